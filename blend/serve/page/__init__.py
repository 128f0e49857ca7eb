"""The page that `blend serve` shows at `/`: files as they are, no build step. It talks to the documented endpoints alone."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

INDEX = "index.html"

FILES: Mapping[str, str] = MappingProxyType(
    {
        INDEX: "text/html; charset=utf-8",
        "icon.svg": "image/svg+xml",
        "frame.css": "text/css; charset=utf-8",
        "answer.css": "text/css; charset=utf-8",
        **{
            f"{name}.js": "text/javascript; charset=utf-8"
            for name in (
                "answer",
                "api",
                "app",
                "compare",
                "conversation",
                "document_row",
                "documents",
                "dom",
                "options",
                "prose",
                "sources",
                "times",
                "tokens",
            )
        },
    }
)
"""Every file by name, with its media type. `INDEX` belongs at `/`, the others at `/page/NAME`; none of them is secret."""

SECURITY: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
)
"""Headers that go with each: nothing is loaded from elsewhere, and no text on the page can become a script."""


def read(name: str) -> bytes:
    """The file's content. Raises `KeyError` for a name that is not one of `FILES`."""
    if name not in FILES:
        raise KeyError(name)
    return files(__package__).joinpath(name).read_bytes()

"""The page: a template with its style, its script and the JSON document put in; nothing is loaded from anywhere."""

from __future__ import annotations

import html
import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from blend.eval.report.output import write_whole
from blend.visible import json_text, visible

_PLACEHOLDER = re.compile(r"@([A-Z_]+)@")
_SCRIPTS = ("charts.js", "text.js", "page.js")


def page_text(document: Mapping[str, Any]) -> str:
    """The HTML page of an analysis document, self-contained.

    A content security policy keeps it from loading anything and from running any script but its own, whatever a prompt, a title
    or a name holds.
    """
    script = "\n".join(map(_asset, _SCRIPTS))
    parts = {
        "TITLE": html.escape(visible(f"{document['workload']} \u00b7 {document['model']}")),
        "STYLE": _asset("page.css"),
        "SCRIPT": script,
        "SCRIPT_HASH": f"sha256-{b64encode(sha256(script.encode()).digest()).decode()}",
        # No tag and no comment can begin inside: `</script>` in a prompt would end the element.
        "DATA": json_text(document, allow_nan=False).replace("<", "\\u003c"),
    }
    # All at once: what a title or a prompt says is never taken for a placeholder.
    return _PLACEHOLDER.sub(lambda mark: parts[mark[1]], _asset("page.html"))


def write_page(document: Mapping[str, Any], path: str | Path) -> None:
    """Write the page to `path`, whole or not at all; `ConfigError` when it cannot be written."""
    write_whole(Path(path), page_text(document).encode())


def _asset(name: str) -> str:
    return files("blend.analyze").joinpath("assets", name).read_text(encoding="utf-8")

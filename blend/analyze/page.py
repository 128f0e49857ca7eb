"""The page: a template with its style, its script and the JSON document put in; nothing is loaded from anywhere."""

from __future__ import annotations

import html
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from blend.report.output import whole_file
from blend.visible import json_text, visible

_SCRIPTS = ("charts.js", "text.js", "page.js")


def page_text(document: Mapping[str, Any]) -> str:
    """The HTML page of an analysis document, self-contained; a content security policy keeps it from loading anything."""
    parts = {
        "@TITLE@": html.escape(visible(f"{document['workload']} \u00b7 {document['model']}")),
        "@STYLE@": _asset("page.css"),
        "@SCRIPT@": "\n".join(map(_asset, _SCRIPTS)),
        # No tag can begin inside: `</script>` in a prompt would end the element.
        "@DATA@": json_text(document, allow_nan=False).replace("<", "\\u003c"),
    }
    page = _asset("page.html")
    # The data goes in last: what a prompt says is never taken for a placeholder.
    for mark, part in parts.items():
        before, found, after = page.partition(mark)
        assert found, f"the template lacks {mark}"
        page = before + part + after
    return page


def write_page(document: Mapping[str, Any], path: str | Path) -> None:
    """Write the page to `path`, whole or not at all; `ConfigError` when it cannot be written."""
    text = page_text(document)
    with whole_file(Path(path)) as draft:
        draft.write_text(text, encoding="utf-8")


def _asset(name: str) -> str:
    return files("blend.analyze").joinpath("assets", name).read_text(encoding="utf-8")

"""Make untrusted text safe to show: control characters and line reordering are written out."""

from __future__ import annotations

import json
import re
from typing import Any

# Controls beyond ASCII's first 32, line and paragraph separators, bidirectional embeddings, overrides and isolates
# (unicode.org/reports/tr9), and lone surrogates, which is how Python holds the bytes of a file name that is not UTF-8.
_BEYOND = "\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_OBEYED = re.compile(f"[\x00-\x1f{_BEYOND}]")
_BEYOND_JSON = re.compile(f"[{_BEYOND}]")


def visible(text: str, keep: str = "") -> str:
    r"""The text with control characters, except `keep`, written as Python escapes: \x1b, \n, \u202e."""
    return _OBEYED.sub(lambda found: found[0] if found[0] in keep else repr(found[0])[1:-1], text)


def json_text(document: Any, **options: Any) -> str:
    r"""JSON in Unicode whose strings hold no control character as it is: \u001b, \u009b, \u202e.

    options: those of `json.dumps`. Surrogates are escaped too, so that the text can always be encoded.
    """
    text = json.dumps(document, ensure_ascii=False, **options)
    return _BEYOND_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)

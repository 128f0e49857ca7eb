"""Text that comes from elsewhere: what may be shown, what is a name, an origin, or JSON."""

from __future__ import annotations

import ipaddress
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from blend.errors import ConfigError

_LONGEST_SHOWN = 40
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?/?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}  # which browsers leave out
_CORPUS_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")  # no capitals: on some file systems a and A are one folder


def is_text(value: str) -> bool:
    """Whether a string is free of surrogates, which no tokenizer takes: bytes that were not UTF-8 become such."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def shown(value: object) -> str:
    """A value as Python writes it, cut to what fits a line."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def is_corpus_name(name: str) -> bool:
    """Whether this can name a corpus."""
    return bool(_CORPUS_NAME.fullmatch(name))


def check_corpus_name(name: str) -> None:
    """Raise `ConfigError` for what cannot name a corpus. The empty name stands for the corpus without one."""
    if name and not is_corpus_name(name):
        raise ConfigError(
            f"{shown(name)} cannot name a corpus: use up to 64 lower-case letters, digits, dashes and underscores, "
            "a letter or digit first"
        )


# Controls beyond ASCII's first 32, line and paragraph separators, bidirectional embeddings, overrides and isolates
# (unicode.org/reports/tr9), and lone surrogates, which is how Python holds the bytes of a file name that is not UTF-8.
_BEYOND = "\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_OBEYED = re.compile(f"[\x00-\x1f{_BEYOND}]")
_BEYOND_JSON = re.compile(f"[{_BEYOND}]")


def visible(text: str, keep: str = "") -> str:
    r"""The text with control characters, except `keep`, written as Python escapes: \x1b, \n, \u202e."""
    return _OBEYED.sub(lambda match: match[0] if match[0] in keep else repr(match[0])[1:-1], text)


def json_text(document: Any, **options: Any) -> str:
    r"""JSON in Unicode whose strings hold no control character as it is: \u001b, \u009b, \u202e.

    options: those of `json.dumps`. Surrogates are escaped too, so that the text can always be encoded.
    """
    text = json.dumps(document, ensure_ascii=False, **options)
    return _BEYOND_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def json_parts(document: Any, depth: int = 6, **options: Any) -> Iterator[str]:
    """The parts of `json_text`, so that no call of the library takes long and other threads get their turns between them.

    depth: of the dicts and lists whose entries are parts.
    """
    if not depth or not document or not isinstance(document, dict | list):
        yield json_text(document, **options)
        return
    is_dict = isinstance(document, dict)
    separator = "{" if is_dict else "["
    for name in document:
        yield separator
        separator = ", "
        if is_dict:
            yield f"{json_text(name)}: "
        yield from json_parts(document[name] if is_dict else name, depth - 1, **options)
    yield "}" if is_dict else "]"


def finite(value: Any) -> Any:
    """A value of JSON, in which every NaN and infinity is None."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(finite, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def counted(number: int, noun: str) -> str:
    """1 chunk, 2 chunks, 3,000 caches."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def is_loopback(host: str) -> bool:
    """Whether this name or address, without a port, is loopback on every machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def origin_of(url: str) -> str:
    """An origin as browsers write it: scheme, host, and the port unless it is the scheme's default.

    Raises `ConfigError` for anything else, such as a path or a wildcard.
    """
    origin = _ORIGIN.fullmatch(url.lower())
    if origin is None:
        raise ConfigError(f"{shown(url)} is no origin: give scheme and host alone, such as https://rag.example.org")
    scheme, host, port = origin.groups()
    return f"{scheme}://{host}" + (f":{port}" if port and port != _DEFAULT_PORTS.get(scheme) else "")

"""Codecs by their names: those that come with kvblend, and one's own."""

from __future__ import annotations

import re

from blend.errors import ConfigError
from blend.store.codecs.base import CastCodec, Codec
from blend.store.codecs.grid import INT4, INT8

_BUILT_IN: tuple[Codec, ...] = (*map(CastCodec, ("native", "float32", "bfloat16", "float16")), INT8, INT4)
_CODECS: dict[str, Codec] = {codec.name: codec for codec in _BUILT_IN}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def register_codec(codec: Codec) -> Codec:
    """Make a codec known in this process, so that entries written with it are read; returns it.

    Every process that reads such entries has to do so: to others they are damaged, and are computed again. Raises
    `ConfigError` for a name that belongs to another class of codecs, and for names that cannot stand in an entry.
    """
    if not _NAME.fullmatch(codec.name) or not codec.parts or not all(map(_NAME.fullmatch, codec.parts)):
        raise ConfigError(
            f"the codec {codec.name!r:.80} needs a name, and parts with names, of letters, digits, dots, dashes, underscores"
        )
    if len(set(codec.parts)) < len(codec.parts):
        raise ConfigError(f"the codec {codec.name!r} has two parts of one name: {', '.join(codec.parts)}")
    built_in = any(codec.name == one.name for one in _BUILT_IN)
    if built_in or _class_name(_CODECS.get(codec.name, codec)) != _class_name(codec):
        raise ConfigError(f"there is another codec of the name {codec.name!r}; give yours a name of its own")
    _CODECS[codec.name] = codec
    return codec


def _class_name(codec: Codec) -> str:
    """The same for a class that was defined once more, as in a notebook."""
    return f"{type(codec).__module__}.{type(codec).__qualname__}"


def codec_names() -> tuple[str, ...]:
    """Every name that `get_codec` knows."""
    return tuple(_CODECS)


def get_codec(name: str) -> Codec:
    """The codec of that name; raises `ConfigError` that lists the choices."""
    try:
        return _CODECS[name]
    except KeyError:
        raise ConfigError(f"unknown codec {name!r}; choose one of {', '.join(_CODECS)}") from None

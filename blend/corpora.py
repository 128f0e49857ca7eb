"""The corpora of one store: where the index of each lies, and which there are.

    <store>/index/                  the corpus without a name
    <store>/corpora/<name>/index/   one with a name

Each has an index, a surrogate context and KV corrections of its own; all share `<store>/kv`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from blend.errors import ConfigError
from blend.limits import shown

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_FOLDER, _INDEX, _MANIFEST = "corpora", "index", "manifest.json"


def check_corpus_name(name: str) -> None:
    """Raise `ConfigError` for what cannot name a corpus; the empty name is that of the one without."""
    # No capitals: on some file systems a and A are one folder, and two corpora would be one.
    if name and not _NAME.fullmatch(name):
        raise ConfigError(
            f"{shown(name)} cannot name a corpus: use up to 64 lower-case letters, digits, dashes and underscores, "
            "a letter or digit first"
        )


def is_corpus_name(name: str) -> bool:
    """Whether this can name a corpus."""
    return bool(_NAME.fullmatch(name))


def index_dir(root: Path, name: str) -> Path:
    """Where the index of a corpus lies in the store `root`."""
    check_corpus_name(name)
    return root / _FOLDER / name / _INDEX if name else root / _INDEX


def corpora(root: Path) -> tuple[str, ...]:
    """Names of the corpora that were precomputed in the store `root`, the one without a name first."""
    return tuple(name for name in ("", *sorted(_folders(root))) if (index_dir(root, name) / _MANIFEST).is_file())


def _folders(root: Path) -> Iterator[str]:
    with suppress(OSError):  # no named corpora, or a store that may not be looked into, as reading it will say
        yield from (path.name for path in (root / _FOLDER).iterdir() if _NAME.fullmatch(path.name))


def require_corpus(root: Path, name: str) -> None:
    """Raise `ConfigError` that lists the corpora there are when this one is not among them.

    Nothing where there is none at all: reading the index says what to do then.
    """
    held = corpora(root)
    if held and name not in held:
        lacking = f"no corpus {name!r}" if name else "no corpus without a name"
        raise ConfigError(f"the store {root} has {lacking}; there are: {', '.join(map(in_words, held))}")


def in_words(name: str) -> str:
    """The corpus for a line to people."""
    return name or "the one without a name"

"""A store that fails now and then: gone, not to be entered, or damaged; and whole again after a while."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Break = Callable[[Path, random.Random], "Mend"]
Mend = Callable[[], None]


def gone(store: Path, draws: random.Random) -> Mend:
    """The folder of the caches is somewhere else."""
    return _swapped(store / "kv", lambda place: None)


def blocked(store: Path, draws: random.Random) -> Mend:
    """Where the caches were stands a file: they can neither be read nor written, whoever the user is."""
    return _swapped(store / "kv" / "objects", lambda place: place.write_bytes(b""))


def damaged(store: Path, draws: random.Random) -> Mend:
    """A tenth of the caches have lost their second half; the server is to find that out and to replace them."""
    entries = sorted((store / "kv" / "objects").rglob("*.safetensors"))
    for entry in draws.sample(entries, max(1, len(entries) // 10)) if entries else ():
        half = entry.with_suffix(".half")
        half.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])
        half.replace(entry)  # a new file, as damage is found when a file is opened; open ones stay whole
    return lambda: None


BREAKS: dict[str, Break] = {"gone": gone, "blocked": blocked, "damaged": damaged}


def _swapped(place: Path, instead: Callable[[Path], object]) -> Mend:
    """Move `place` away; the mend puts it back, whatever was made there meanwhile."""
    away = place.with_name(f"{place.name}.away")
    place.rename(away)
    instead(place)

    def mend() -> None:
        remove(place)
        away.rename(place)

    return mend


def remove(place: Path) -> None:
    """A file, or a folder with all that is in it; what is not there is gone already."""
    if place.is_dir():
        shutil.rmtree(place, ignore_errors=True)
    place.unlink(missing_ok=True) if not place.is_dir() else None


@contextmanager
def broken(name: str, store: Path, draws: random.Random) -> Iterator[None]:
    """The store fails as `name` says, until the end of the block."""
    mend = BREAKS[name](store, draws)
    try:
        yield
    finally:
        mend()

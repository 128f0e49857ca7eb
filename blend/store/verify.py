"""Reading a whole entry to find out whether it is as it was written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blend.errors import EntryDamagedError
from blend.store.names import key_of

if TYPE_CHECKING:
    from blend.store.base import ChunkStore


def verify_entry(store: ChunkStore, name: str) -> str:
    """The damage of an entry, every byte read; empty when there is none. Raises `StoreError` for an outage."""
    try:
        reader = store.open(key_of(name))
        if reader is not None:
            reader.counts = False  # verifying must not push out of memory what prompts ask for
            with reader:
                for index in range(reader.layers):
                    reader.layer(index)
    except EntryDamagedError as error:
        return str(error)
    return ""

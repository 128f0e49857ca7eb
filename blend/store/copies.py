"""Copies in nearer tiers of caches that the far place has no more: a tier that was down missed what was removed meanwhile."""

from __future__ import annotations

from blend.errors import StoreError, StoreUnreachableError
from blend.store.admin import places, still_pinned
from blend.store.backend import CACHES, Backend, key_of


def remove_copies(backend: Backend, *, dry_run: bool = False) -> int:
    """Remove them, pinned ones excepted; how many they are. dry_run: only count.

    Raises `StoreError` when the far place cannot be asked, and, after all others are done, where a nearer tier cannot.
    """
    (_, far), *nearer = places(backend)
    held = {name for page in far.names(CACHES) for name in page} if nearer else set()
    removed, left = 0, list[str]()
    for _, tier in nearer:
        try:
            for page in tier.names(CACHES):
                lacking = [name for name in page if name not in held]
                pins = still_pinned(far, [key_of(name).digest for name in lacking])
                for name in lacking:
                    if key_of(name).digest not in pins:
                        removed += 1
                        _ = dry_run or tier.delete(name)
        except StoreError:
            left.append(tier.place)
    if left and not dry_run:
        raise StoreUnreachableError(
            f"copies of what was removed may still be in {', '.join(left)}: run the same command again when that is up"
        )
    return removed

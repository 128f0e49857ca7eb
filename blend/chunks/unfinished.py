"""The prompts of an unfinished fit: what was computed of them before an interruption is not computed again.

    unfinished = UnfinishedFit(library, prompts)
    rows = unfinished.read(layout)           # None: compute them, and then
    unfinished.keep(layout, rows, seconds)
    unfinished.clear()                       # when the fit ends

The store keeps the KV of each finished prompt, sealed as its artifacts are, but without a new generation: nothing but the same
fit reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load, save

from blend.errors import StoreError
from blend.layout import PromptLayout
from blend.store.backend import ARTIFACTS, artifact_name

if TYPE_CHECKING:
    from blend.chunks.library import ChunkLibrary
    from blend.model.cache import KV

WRITE_RATE = 50e6
"""Bytes a second that any disk writes. What is computed faster than it is written is not worth keeping."""


class UnfinishedFit:
    """What the store keeps of a fit's prompts. Only a store in a folder keeps any: for a server they would be too large."""

    def __init__(self, library: ChunkLibrary, prompts: Sequence[PromptLayout]) -> None:
        self._store = library.store
        identity = library.isolated.identity
        decoder = library.decoder
        salt = f"{decoder.device.type}/{decoder.dtype}/"
        self._names = {}
        for layout in prompts:
            prompt = f"{salt}{layout.bounds}/{layout.token_ids}"
            digest = hashlib.sha256(prompt.encode()).hexdigest()
            self._names[layout] = artifact_name(identity.fit_name(digest[:16]))
        self._ending = identity.fit_name("").partition("-")[2]
        stored = set(self._stored())
        self.finished = [layout for layout in prompts if self._names[layout] in stored]

    @property
    def tokens(self) -> int:
        """Tokens of the prompts that are kept."""
        return sum(layout.rows for layout in self.finished)

    def read(self, layout: PromptLayout) -> list[KV] | None:
        """The KV of a prompt's rows in every layer, on the CPU; None unless `keep` was called with it. Raises `StoreError`."""
        if layout not in self.finished:
            return None
        _, content = self._store.read_manifest(self._names[layout])
        if content is None:
            return None
        try:
            tensors = load(content)
            return [(tensors[f"{index}.keys"], tensors[f"{index}.values"]) for index in range(len(tensors) // 2)]
        except (SafetensorError, KeyError):  # written by someone, not by `keep`
            return None

    def keep(self, layout: PromptLayout, rows: Sequence[KV], seconds: float) -> None:
        """Keep the KV of a prompt's rows, which took so long to compute, if writing them is quicker."""
        nbytes = sum(part.nbytes for layer in rows for part in layer)
        if self._store.folder is None or nbytes > seconds * WRITE_RATE:
            return
        tensors = {}
        for index, (keys, values) in enumerate(rows):
            tensors[f"{index}.keys"] = keys.cpu().contiguous()
            tensors[f"{index}.values"] = values.cpu().contiguous()
        with suppress(StoreError):  # a full disk: the fit itself does not need it
            self._store.put_manifest(self._names[layout], save(tensors))

    def clear(self) -> None:
        """Remove what is kept of this fit and of earlier ones of the same model and corpus. Raises `StoreError`."""
        for name in self._stored():
            self._store.backend.delete(name)

    def _stored(self) -> list[str]:
        if self._store.folder is None:
            return []
        prompts = [name for name in self._store.backend.names(ARTIFACTS) if name.startswith(f"{ARTIFACTS}fit_")]
        return [name for name in prompts if name.partition("-")[2] == self._ending]

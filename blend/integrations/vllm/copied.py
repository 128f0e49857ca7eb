"""The first stage: KV that the prefill process computed is copied into vLLM's cache."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from blend.integrations.vllm import wire
from blend.integrations.vllm.contract import Load, LoadFailedError, Site
from blend.integrations.vllm.shelf import KV, Described, digest

_SECONDS = 10.0  # for the descriptor, or the next bytes, to come: the KV lies ready


class CopiedKV:
    """A `Stage`.

    With tensor parallelism each process takes its own heads. Raises `ValueError` for a cache that has no writer.
    """

    apart = True
    options = frozenset({"socket"})

    def __init__(self, site: Site, options: Mapping[str, Any]) -> None:
        lacking = [name for name, layer in zip(site.names, site.layers, strict=True) if not _writes(layer)]
        if lacking:
            kind = type(site.layers[0].impl).__name__
            raise ValueError(f"kvblend: the attention backend {kind} has no do_kv_cache_update; choose another backend")
        self._site, self._socket = site, str(options.get("socket", wire.SOCKET))
        parallel = site.config.parallel_config
        self._processes, self._rank = parallel.tensor_parallel_size, parallel.rank % parallel.tensor_parallel_size
        self._dtype = site.config.model_config.dtype

    def fill(self, load: Load) -> None:
        """See `Stage`."""
        device = self._site.device
        slots = self._site.slots(load, torch.arange(load.start, load.stop, device=device))
        try:
            with self._held(load) as layers:
                for index, pair in enumerate(layers):
                    fresh = [part.to(device, self._dtype).contiguous() for part in pair]
                    self._site.write(index, fresh[0], fresh[1], slots)
        except wire.WireError as error:
            raise LoadFailedError(str(error)) from None
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()

    unfinished = False  # nothing waits

    def rest(self, *, alone: bool) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is kept."""

    @contextmanager
    def _held(self, load: Load) -> Iterator[Iterator[KV]]:
        """What is held for a request, layer by layer: the rows of `load`, and the heads of this process."""
        where = load.start, load.stop, self._rank, self._processes
        with wire.connect(self._socket, _SECONDS) as sock:
            wire.send(sock, {"attach": load.ticket})
            answer, fd = wire.receive(sock)
        try:
            told = self._told(answer, load)
            memory = mmap.mmap(fd if fd is not None else -1, told.nbytes, access=mmap.ACCESS_COPY)
        finally:
            if fd is not None:
                os.close(fd)
        yield told.part(memory, *where)

    def _told(self, answer: wire.Message, load: Load) -> Described:
        if answer.get("held") is None:
            raise LoadFailedError("the prefill process holds nothing under this ticket any more")
        told = Described.of(answer["held"])
        self._check(told, load)
        return told

    def _check(self, told: Described, load: Load) -> None:
        """Nothing is written that is not this prompt's or does not fit."""
        if told.prompt != digest(load.token_ids) or told.rows < load.stop:
            raise LoadFailedError("what the prefill process holds is of another prompt")
        if len(told.layers) != len(self._site.layers):
            raise LoadFailedError(f"it has {len(told.layers)} layers, vLLM's model {len(self._site.layers)}")
        for layer, (heads, *widths) in zip(self._site.layers, told.layers, strict=True):
            mine = max(1, heads // self._processes)
            if mine != layer.num_kv_heads or any(width != layer.head_size for width in widths):
                raise LoadFailedError(
                    f"its layers have {heads} KV heads of {widths}, vLLM's {layer.num_kv_heads} of {layer.head_size}: "
                    "both must hold the same model"
                )


def _writes(layer: Any) -> bool:
    return callable(getattr(layer.impl, "do_kv_cache_update", None))

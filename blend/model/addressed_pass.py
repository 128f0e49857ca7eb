"""A pass over rows, positions and caches that device memory names, so that a graph can repeat it for every prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from blend.model.cache import KV
from blend.model.driver import PassLayer
from blend.model.passes import MOST_WATCHED, Halt, LayerQuery, OnLayer, Result, RowRequest, Watch, nothing, same_memory
from blend.model.row_decoder import DrivenDecoder
from blend_kernels import CacheAddresses, attend_rows, mass_rows, write_rows

MOST_PROMPTS = 16  # in a pass of at most as many rows; larger passes are of one prompt
MOST_KEYS = 16_384  # that attention cuts into parts; of longer prompts each part is longer
PART_LAYERS = 2  # of a part of a captured pass


class Part(NamedTuple):
    """Some layers of a captured pass. layers: their number from the first layer on; the KV of so many must be in place."""

    layers: int
    replay: Callable[[], None]


class AddressedPass:
    """A `DrivenPass` over rows and caches that device memory names.

    Args:
        decoder: runs the rows.
        addresses: of the prompts' caches.
        rows: how many, padded ones included.
        watch: what is observed instead of logits; the rows are then of one prompt.

    Attributes:
        before_layer: called with each layer before it uses its cache.

    """

    def __init__(
        self,
        decoder: DrivenDecoder,
        addresses: CacheAddresses,
        rows: int,
        watch: Watch | None = None,
    ) -> None:
        self.decoder = decoder
        self._addresses = addresses
        self.rows = rows
        self.watch = watch
        device = decoder.device
        self._token_ids = torch.zeros((1, rows), dtype=torch.int64, device=device)
        self._positions = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._prompts = torch.zeros_like(self._positions)
        self._last = torch.zeros_like(self._positions[:1])
        self._counts = list[int]()  # rows of each prompt
        self._fresh: tuple[int, KV] | None = None
        self._masses = list[Tensor]()
        layers = [PassLayer(self, index) for index in range(decoder.kv_layers)]
        self._cache = Cache(layers=layers)
        self.before_layer: OnLayer = nothing

    @property
    def cuts(self) -> list[int]:
        """Layers before which a capture begins another part."""
        return list(range(PART_LAYERS, self.depth, PART_LAYERS))

    @property
    def depth(self) -> int:
        """How many layers run."""
        if self.watch is None or self.watch.logits:
            return self.decoder.kv_layers
        return self.watch.layers[-1] + 1

    def fill(self, requests: Sequence[RowRequest]) -> None:
        """Take the rows of these requests."""
        counts = [request.positions.shape[0] for request in requests]
        count = sum(counts)
        self._token_ids[:, :count] = _joined([request.token_ids for request in requests], 1)
        self._positions[:count] = _joined([request.positions for request in requests], 0)
        if counts == self._counts:
            return
        self._positions[count:] = -1
        self._last.fill_(count - 1)
        rows = torch.tensor(counts)
        prompts = torch.repeat_interleave(torch.arange(len(counts)), rows)
        self._prompts[:count] = prompts.to(self._prompts.device, non_blocking=True)
        self._counts = counts

    def run(self) -> Result:
        """Run the rows."""
        decoder = self.decoder
        arguments = {decoder.cache_argument: self._cache}
        if self.rows > MOST_PROMPTS or self.watch is not None:
            arguments["logits_to_keep"] = self._last
        positions = self._positions.clamp_min(0)[None]
        self._masses = []
        logits = None
        with decoder.driven(self), suppress(Halt):
            out = decoder.model(
                input_ids=self._token_ids,
                position_ids=positions,
                use_cache=True,
                **arguments,
            )
            logits = out.logits[0]
        return Result(logits, torch.stack(self._masses) if self._masses else None)

    def length(self, layer: int) -> int:
        """None that the host knows."""
        return 0

    def write(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
    ) -> KV:
        """Write a layer's fresh KV into the caches. Returns it, as a sign for `attend`."""
        self.before_layer(layer)
        write_rows(self._addresses, layer, keys, values, self._positions, self._prompts)
        self._fresh = layer, (keys, values)
        return keys, values

    def attend(self, attention: LayerQuery) -> Tensor:
        """Attention of the rows over their caches, `[batch, rows, heads, value_dim]`."""
        kv = (attention.key, attention.value)
        if self._fresh is None or not all(map(same_memory, self._fresh[1], kv)):
            raise RuntimeError("the model changes the keys and values that its cache returned")
        layer, fresh = self._fresh
        watched = self.watch is not None and layer in self.watch.layers
        attended = attend_rows(
            self._addresses,
            layer,
            attention.query,
            self._positions,
            self._prompts,
            most_keys=MOST_KEYS,
            return_lse=watched,
            **attention.rule,
        )
        if not watched:
            return attended.transpose(1, 2)  # type: ignore[union-attr]
        out, lse = attended
        assert self.watch is not None
        self._masses.append(self._mass(layer, attention, lse, peak=self.watch.peak))
        if layer == self.watch.layers[-1] and not self.watch.logits:
            raise Halt(fresh)
        return out.transpose(1, 2)

    def _mass(
        self,
        layer: int,
        attention: LayerQuery,
        lse: Tensor,
        *,
        peak: bool,
    ) -> Tensor:
        """What keys receive, summed over heads, `[kinds, MOST_WATCHED]`: from all rows, with `peak` also from the last one."""
        rule = {name: value for name, value in attention.rule.items() if name != "sinks"}
        masses: Tensor = mass_rows(
            self._addresses,
            layer,
            attention.query,
            self._positions,
            lse,
            most_keys=MOST_WATCHED,
            reduce="max" if peak else "sum",
            with_last=peak,
            **rule,
        )
        return masses.sum(1)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

"""A pass over rows, positions and caches that device memory names, so that a graph can repeat it for every prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from blend.model.cache import KV
from blend.model.driver import PassLayer, RowDriver
from blend.model.passes import Halt, OnLayer, RowRequest, nothing, same_memory
from blend_kernels import CacheAddresses, attend_rows, mass_rows, write_rows

MOST_PROMPTS = 16  # in a pass of at most as many rows; larger passes are of one prompt
MOST_KEYS = 16_384  # that attention cuts into parts; of longer prompts each part is longer
PART_LAYERS = 2  # of a part of a captured pass


MOST_WATCHED = 131_072  # keys whose attention a pass sums up


class Watch(NamedTuple):
    """What a pass observes of its rows' attention.

    Attributes:
        layers: ascending; the pass ends with the last of them, unless logits are wanted.
        peak: see `QueryAttention`.
        logits: of the last row as well.

    """

    layers: tuple[int, ...]
    peak: bool
    logits: bool = False


class Result(NamedTuple):
    """What a pass gives.

    logits: of all rows `[rows, vocab]`, or in large passes of the last one `[1, vocab]`; None if not wanted. masses: attention
    that keys receive, fp32 `[watched layers, kinds, MOST_WATCHED]`, summed over heads; None without a watch.
    """

    logits: Tensor | None
    masses: Tensor | None = None


class Part(NamedTuple):
    """Some layers of a captured pass. layers: their number from the first layer on; the KV of so many must be in place."""

    layers: int
    replay: Callable[[], None]


class AddressedPass:
    """A `DrivenPass` over rows and caches that device memory names.

    Args:
        driver: runs the rows.
        addresses: of the prompts' caches.
        rows: how many, padded ones included.
        watch: what is observed instead of logits; the rows are then of one prompt.

    Attributes:
        before_layer: called with each layer before it uses its cache.

    """

    def __init__(self, driver: RowDriver, addresses: CacheAddresses, rows: int, watch: Watch | None = None) -> None:
        self._driver = driver
        self._addresses = addresses
        self.rows = rows
        self.watch = watch
        device = driver.device
        self._token_ids = torch.zeros((1, rows), dtype=torch.int64, device=device)
        self._positions = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._prompts = torch.zeros_like(self._positions)
        self._last = torch.zeros_like(self._positions[:1])
        self._counts = list[int]()  # rows of each prompt
        self._fresh: tuple[int, KV] | None = None
        self._masses = list[Tensor]()
        layers = [PassLayer(self, index) for index in range(driver.kv_layers)]
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
            return self._driver.kv_layers
        return self.watch.layers[-1] + 1

    def fill(self, requests: Sequence[RowRequest]) -> None:
        """Take the rows of these requests."""
        counts = [request.run.rows for request in requests]
        count = sum(counts)
        self._token_ids[:, :count] = torch.cat([request.token_ids for request in requests], 1)
        self._positions[:count] = torch.cat([request.positions for request in requests])
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
        driver = self._driver
        arguments = {driver.cache_argument: self._cache}
        if self.rows > MOST_PROMPTS or self.watch is not None:
            arguments["logits_to_keep"] = self._last
        positions = self._positions.clamp_min(0)[None]
        self._masses = []
        logits = None
        with driver.driven(self), suppress(Halt):
            out = driver.model(input_ids=self._token_ids, position_ids=positions, use_cache=True, **arguments)
            logits = out.logits[0]
        return Result(logits, torch.stack(self._masses) if self._masses else None)

    def length(self, layer: int) -> int:
        """None that the host knows."""
        return 0

    def write(self, layer: int, keys: Tensor, values: Tensor) -> KV:
        """Write a layer's fresh KV into the caches. Returns it, as a sign for `attend`."""
        self.before_layer(layer)
        write_rows(self._addresses, layer, keys, values, self._positions, self._prompts)
        self._fresh = layer, (keys, values)
        return keys, values

    def attend(self, layer: int, query: Tensor, kv: KV, rule: Mapping[str, Any]) -> Tensor:
        """Attention of the rows over their caches, `[batch, rows, heads, value_dim]`."""
        if self._fresh is None or not all(map(same_memory, self._fresh[1], kv)):
            raise RuntimeError("the model changes the keys and values that its cache returned")
        layer, fresh = self._fresh
        out, lse = attend_rows(
            self._addresses, layer, query, self._positions, self._prompts, most_keys=MOST_KEYS, **rule
        )
        watch = self.watch
        if watch is not None and layer in watch.layers:
            mass_rule = {name: value for name, value in rule.items() if name != "sinks"}
            masses = mass_rows(
                self._addresses,
                layer,
                query,
                self._positions,
                lse,
                most_keys=MOST_WATCHED,
                peak=watch.peak,
                **mass_rule,
            )
            self._masses.append(masses.sum(1))
            if layer == watch.layers[-1] and not watch.logits:
                raise Halt(fresh)
        return out.transpose(1, 2)

"""KV of prompts that is held for vLLM, in shared memory without a name.

Each piece is a memory file (`memfd_create`) whose descriptor is handed to vLLM's workers: when the last process that has it
ends, in whatever way, the memory is free again, and no file of it was ever there.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache

KV = tuple[torch.Tensor, torch.Tensor]


class NoRoomError(Exception):
    """More KV is held already than may be."""


class Described(NamedTuple):
    """What lies in a piece: for each layer the keys, then the values, `[rows, kv_heads, head_dim]`.

    layers: kv_heads, head_dim of keys, head_dim of values. prompt: a digest of the token ids that the rows are of.
    """

    rows: int
    dtype: str
    layers: tuple[tuple[int, int, int], ...]
    prompt: str

    @classmethod
    def of(cls, told: dict[str, Any]) -> Described:
        """Out of `_asdict()` that went through JSON."""
        return cls(told["rows"], told["dtype"], tuple(map(tuple, told["layers"])), told["prompt"])

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(math.prod(shape) for pair in self.shapes for shape in pair) * self._dtype.itemsize

    @property
    def shapes(self) -> list[tuple[tuple[int, int, int], tuple[int, int, int]]]:
        """Of each layer's keys and values."""
        return [((self.rows, heads, key), (self.rows, heads, value)) for heads, key, value in self.layers]

    @property
    def _dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    def part(self, memory: mmap.mmap, start: int, stop: int, rank: int, processes: int) -> Iterator[KV]:
        """Of each layer the rows `start` to `stop - 1`, and the heads that one of so many processes has."""
        for keys, values in self.views(memory):
            mine = share(keys.shape[1], rank, processes)
            yield keys[start:stop, mine], values[start:stop, mine]

    def views(self, memory: mmap.mmap) -> list[KV]:
        """The tensors in a piece's memory, layer by layer."""
        flat, at = torch.frombuffer(memory, dtype=self._dtype), 0
        found = []
        for keys, values in self.shapes:
            pair = []
            for shape in (keys, values):
                size = math.prod(shape)
                pair.append(flat[at : at + size].view(shape))
                at += size
            found.append((pair[0], pair[1]))
        return found


def share(heads: int, rank: int, processes: int) -> slice:
    """Those of a layer's KV heads that one of so many processes has; several have the same one where heads are few."""
    first = rank * heads // processes
    return slice(first, first + max(1, heads // processes))


class Shelf:
    """Pieces under tickets that nobody can guess, within `budget` bytes. Threads may share it."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._lock = threading.Lock()
        self._held: dict[str, tuple[int, Described]] = {}
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return self._nbytes

    def put(self, cache: BlendedCache, token_ids: Sequence[int]) -> str:
        """Hold copies of the KV of a prompt's rows but the last, which vLLM computes; the ticket.

        Raises `NoRoomError`.
        """
        pairs = [cache.view(layer) for layer in range(len(cache.layers))]
        told = _described(pairs, token_ids)
        with self._lock:
            if self._nbytes + told.nbytes > self.budget:
                raise NoRoomError(
                    f"{len(self._held)} prompts hold {self._nbytes >> 20} MiB of {self.budget >> 20}; "
                    "this one is left to vLLM's own prefill"
                )
            self._nbytes += told.nbytes
        try:
            fd = _written(pairs, told)
        except BaseException:
            with self._lock:
                self._nbytes -= told.nbytes
            raise
        ticket = secrets.token_hex(16)
        with self._lock:
            self._held[ticket] = fd, told
        return ticket

    def get(self, ticket: str) -> tuple[int, Described] | None:
        """A descriptor of the piece, which the caller closes, and what lies in it; None for a ticket that is not valid."""
        with self._lock:
            found = self._held.get(ticket)
            return None if found is None else (os.dup(found[0]), found[1])

    def release(self, ticket: str) -> None:
        """Hold it no longer; vLLM's workers that read it at this moment finish undisturbed."""
        with self._lock:
            found = self._held.pop(ticket, None)
            if found is not None:
                os.close(found[0])
                self._nbytes -= found[1].nbytes


def digest(token_ids: Sequence[int]) -> str:
    """Names a prompt by its token ids."""
    return sha256(",".join(map(str, token_ids)).encode()).hexdigest()


def _described(pairs: Sequence[KV], token_ids: Sequence[int]) -> Described:
    rows, dtype = len(token_ids) - 1, str(pairs[0][0].dtype).removeprefix("torch.")
    layers = tuple((keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in pairs)
    return Described(rows, dtype, layers, digest(token_ids))


def _written(pairs: Sequence[KV], told: Described) -> int:
    """The descriptor of a new piece."""
    fd = os.memfd_create("kvblend", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, told.nbytes)  # an error now instead of a signal while it is written
        for source, target in zip(pairs, told.views(mmap.mmap(fd, told.nbytes)), strict=True):
            for of_prompt, here in zip(source, target, strict=True):
                here.copy_(of_prompt[0, :, : told.rows].transpose(0, 1))
    except BaseException:
        os.close(fd)
        raise
    return fd

"""The fast ways of a GPU, each of which must prove itself on the machine before a decoder uses it.

What is wrong or cannot run is switched off, with one log line that says what to report; the slower way remains.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal, NamedTuple

from blend.model.graphs import RowGraphs
from blend_kernels import LayerShape, placing_fault

if TYPE_CHECKING:
    from blend.model.decoder import Decoder

DevicePath = Literal["auto", "eager"]
LOG = logging.getLogger("kvblend.device")


class Ways(NamedTuple):
    """What a decoder uses: "placing" by a kernel, "graphs" of passes. Each "on", or the reason why it is off."""

    placing: str
    graphs: str


def take_fast_ways(decoder: Decoder, path: DevicePath = "auto") -> None:
    """Let a decoder use what its GPU can do: everything that proves itself here, or with "eager" nothing of it."""
    if decoder.device.type != "cuda":
        return
    if path == "eager":
        decoder.placing = "torch"
        return
    kinds = [
        (LayerShape(*layer.key_shape, *layer.value_shape), layer.keys.turn, layer.values.turn)
        for layer in decoder.rotations
    ]
    if fault := placing_fault(kinds, decoder.dtype, decoder.device):
        decoder.placing = "torch"
        message = "kvblend: plain torch places chunks on this machine, which is slower: %s (please report it with `blend env`)"
        LOG.warning(message, fault)
    decoder.graphs = RowGraphs(decoder)
    _ = decoder.pass_rows  # timed now, not at the first prompt


def ways_of(decoder: Decoder) -> Ways:
    """Which ways a decoder uses."""
    placing = "on" if decoder.placing is None else "off"
    graphs = "off" if decoder.graphs is None else decoder.graphs.off or "on"
    return Ways(placing, graphs)

"""The fast ways of a GPU, each of which must prove itself on the machine before a decoder uses it.

What is wrong or cannot run is switched off, with one log line that says what to report; the slower way remains.
"""

from __future__ import annotations

import logging
from typing import Literal, NamedTuple

from blend.errors import first_line
from blend.model.fused import FusedModules
from blend.model.graphs import RowGraphs
from blend.model.row_decoder import DrivenDecoder
from blend_kernels import LayerShape, placing_fault

DevicePath = Literal["auto", "eager"]
LOG = logging.getLogger("kvblend.device")


class Ways(NamedTuple):
    """What a decoder uses: "placing" by a kernel, "graphs" of passes, "fused" modules. Each "on", or why it is off."""

    placing: str
    graphs: str
    fused: str


def take_fast_ways(decoder: DrivenDecoder, path: DevicePath = "auto") -> None:
    """Let a decoder use what its GPU can do: everything that proves itself here, or with "eager" nothing of it."""
    if decoder.device.type != "cuda":
        return
    if path == "eager":
        decoder.placing = "torch"
        return
    kinds = []
    for layer in decoder.rotations:
        shape = LayerShape(*layer.key_shape, *layer.value_shape)
        kinds.append((shape, layer.keys, layer.values))
    if fault := placing_fault(kinds, decoder.dtype, decoder.device):
        decoder.placing = "torch"
        message = "kvblend: plain torch places chunks on this machine, which is slower: %s (please report it with `blend env`)"
        LOG.warning(message, fault)
    try:
        decoder.fused = FusedModules.of(decoder.layers)
    except Exception as error:  # of a compiler or driver
        decoder.fused = FusedModules()
        LOG.warning(
            "kvblend: passes use the model's own norms and activations, which are slower: %s (please report it with "
            "`blend env`)",
            first_line(error),
        )
    decoder.graphs = RowGraphs(decoder, decoder.rotations)
    _ = decoder.pass_rows  # timed now, not at the first prompt


def ways_of(decoder: DrivenDecoder) -> Ways:
    """Which ways a decoder uses."""
    placing = "on" if decoder.placing is None else "off"
    graphs = "off" if decoder.graphs is None else decoder.graphs.off or "on"
    fused = "on" if decoder.fused.count else "off"
    return Ways(placing, graphs, fused)

"""Rows by quantised models in vLLM compared with transformers computing the same; run where vLLM is.

Usage: rows_quantised_proof.py FOLDER, in which it leaves found.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from quantised import int8_in_transformers, save_int8
from rows_proof import Proof, spare
from tiny import save_model
from vllm import EngineArgs

from blend.integrations.vllm.stage import fingerprints
from blend.model.decoder import Decoder

LENGTHS = (128, 517)


class Quantised(Proof):
    """Of which the store holds caches, and the probe, of others alone."""

    def learnt_by_vllm(self) -> dict[str, Any]:
        """What all prompts lack is computed with them, and then stored."""
        self.configured()
        filled = [self.stage.blender.blend(layout, spare(layout)) for layout in self.layouts]
        answers, own = self.decoded("first"), self.decoded("own", tickets=False)
        while len(self.stage.blender.background):
            self.stage.blender.background.run(alone=True)
        again = [self.stage.blender.blend(layout, spare(layout)) for layout in self.layouts]
        return {
            "hits before": sum(hit for one in filled for hit in one.hits),
            "full": answers == own,
            "hits after": all(hit for one in again for hit in one.hits),
            "own name": self.rows.decoder.fingerprint != self.decoder.fingerprint,
        }

    def ratios(self) -> dict[str, Any]:
        """Answers over chunks that vLLM encoded, with all rows recomputed and with some, against its own prefill's."""
        own = self.decoded("own", tickets=False)
        self.configured(ratio=1.0)
        every = self.decoded("every")
        self.configured(ratio=0.15)
        filled = [self.stage.blender.blend(layout, spare(layout)) for layout in self.layouts]
        some = self.decoded("some")
        return {
            "every": every == own,
            "some differ": any(mine != theirs for mine, theirs in zip(some, own, strict=True)),
            "share": max(one.selection.rows.shape[0] / one.selection.rows[-1].item() for one in filled),
        }

    def distances(self) -> dict[str, float]:
        """Of the KV of all rows: from kvblend's blend of the same rows, and from that with all rows recomputed."""
        found = {"kvblend": 0.0, "full": 1.0}
        for layout in self.layouts:
            config = self.configured(selector="random", ratio=0.15)
            mine, theirs = self.blender.prefill(layout, config=config), self.stage.blender.blend(layout, spare(layout))
            assert mine.selection.rows.tolist() == theirs.selection.rows.tolist()
            full = self.blender.prefill(layout, config=self.configured(ratio=1.0))
            found["kvblend"] = max(found["kvblend"], self._far(mine.cache, theirs.cache, layout.rows - 1))
            found["full"] = min(found["full"], self._far(full.cache, theirs.cache, layout.rows - 1))
        return found

    def _far(self, some: Any, others: Any, rows: int) -> float:
        """Norm of the difference, relative to the norm, in the layer where it is largest."""
        pairs = [
            pair for at in range(len(self.decoder.layers)) for pair in zip(some.view(at), others.view(at), strict=True)
        ]
        cut = [(one[:, :, :rows], two[:, :, :rows]) for one, two in pairs]
        return max(float((one - two).norm() / one.norm()) for one, two in cut)


def int8(folder: Path, plain: Path) -> dict[str, Any]:
    """A checkpoint of integers."""
    decoder = Decoder(int8_in_transformers(plain), None, "int8")
    proof = Quantised(folder, save_int8(plain, folder / "int8"), decoder, LENGTHS)
    return {"learnt": proof.learnt_by_vllm(), "ratios": proof.ratios(), "distances": proof.distances()}


def online(folder: Path, plain: Path) -> dict[str, Any]:
    """The files of a model that is not quantised, of which the store has caches and the probe; vLLM rounds them as it loads."""
    decoder = Decoder.load(str(plain), device="cpu", dtype="bfloat16")
    proof = Quantised(folder, plain, decoder, LENGTHS, dtype="bfloat16", quantization="fp8_per_channel")
    return {"learnt": proof.learnt_by_vllm(), "ratios": proof.ratios()}


def deep(folder: Path) -> bool:
    """Whether a model is admitted in some of whose many layers an activation is rounded the other way at another position."""
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8}
    plain = save_model(folder / "plain", initializer_range=0.04, **shape)
    decoder = Decoder.load(str(plain), device="cpu", dtype="float32")
    return len(Quantised(folder, save_int8(plain, folder / "int8"), decoder, ()).rows.decoder.rotations) == 12


def names(plain: Path) -> list[str]:
    """Names of the caches of one model's files, by vLLM's options of quantisation."""
    options: tuple[dict[str, Any], ...] = (
        {},
        {"quantization": "fp8_per_channel"},
        {"quantization": "online", "quantization_config": {"linear": "fp8_per_channel"}},
        {"quantization": "online", "quantization_config": {"linear": "fp8_per_channel", "ignore": ["*.o_proj"]}},
    )
    return [
        fingerprints(EngineArgs(str(plain), skip_tokenizer_init=True, **one).create_engine_config())[0]
        for one in options
    ]


def cache_of_fp8(folder: Path, plain: Path) -> str:
    """How vLLM refuses to start with a checkpoint that asks for a quantised KV cache."""
    model = save_int8(plain, folder / "fp8-cache", fp8_cache=True)
    try:
        Quantised(folder, model, Decoder.load(str(plain), device="cpu"), ())
    except Exception as error:
        return str(error)
    return ""


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    plain = save_model(folder / "plain", initializer_range=0.08)
    found: dict[str, Any] = {
        "int8": int8(folder / "a", plain),
        "online": online(folder / "b", plain),
        "deep": deep(folder / "d"),
        "names": names(plain),
        "cache of fp8": cache_of_fp8(folder / "c", plain),
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

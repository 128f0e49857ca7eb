"""Rows by quantised models in vLLM compared with transformers computing the same: caches of other models are not used.

`test_rows.py` runs this file in a process of its own, in which vLLM's engine is.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from quantised import int8_in_transformers, save_int8
from rows_proof import Proof, blended, drain
from tiny import save_model
from vllm import EngineArgs

from blend.integrations.vllm.admission import fingerprints
from blend.integrations.vllm.workers import ColdError
from blend.model.decoder import Decoder

LENGTHS = (128, 517)


class Quantised(Proof):
    """Of which the store holds caches, and the probe, of others alone."""

    def check_learnt_by_vllm(self) -> None:
        """What all prompts lack is computed by vLLM, and then stored."""
        assert self.rows.decoder.fingerprint != self.decoder.fingerprint
        self.configured()
        for layout in self.layouts:
            with pytest.raises(ColdError):
                blended(self.worker.blender, layout)
        assert self.decoded("first") == self.decoded("own", tickets=False)
        drain(self.worker.blender)
        again = [blended(self.worker.blender, layout) for layout in self.layouts]
        assert all(hit for one in again for hit in one.hits)

    def check_answers(self) -> None:
        """Over chunks that vLLM encoded: with all rows recomputed its own prefill's, with some others."""
        own = self.decoded("own", tickets=False)
        self.configured(ratio=1.0)
        assert self.decoded("every") == own
        self.configured(ratio=0.15)
        filled = [blended(self.worker.blender, layout) for layout in self.layouts]
        assert max(one.selection.rows.shape[0] / one.selection.rows[-1].item() for one in filled) < 0.3
        assert self.decoded("some") != own

    def check_distances(self) -> None:
        """KV is much nearer to kvblend's blend of the same rows than to that with all rows recomputed.

        Activations that are rounded the other way change all that comes after.
        """
        for layout in self.layouts:
            config = self.configured(selector="random", ratio=0.15)
            mine, theirs = self.blender.prefill(layout, config=config), blended(self.worker.blender, layout)
            assert mine.selection.rows.tolist() == theirs.selection.rows.tolist()
            full = self.blender.prefill(layout, config=self.configured(ratio=1.0))
            near = self._far(mine.cache, theirs.cache, layout.rows - 1)
            assert self._far(full.cache, theirs.cache, layout.rows - 1) > 5 * near

    def _far(self, some: Any, others: Any, rows: int) -> float:
        """Norm of the difference, relative to the norm, in the layer where it is largest."""
        pairs = [
            pair for at in range(len(self.decoder.layers)) for pair in zip(some.view(at), others.view(at), strict=True)
        ]
        cut = [(one[:, :, :rows], two[:, :, :rows]) for one, two in pairs]
        return max(float((one - two).norm() / one.norm()) for one, two in cut)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_model(tmp_path_factory.mktemp("plain") / "plain", initializer_range=0.08)


def test_a_checkpoint_of_integers(plain: Path, tmp_path: Path) -> None:
    decoder = Decoder(int8_in_transformers(plain), None, "int8")
    proof = Quantised(tmp_path, save_int8(plain, tmp_path / "int8"), decoder, LENGTHS)
    proof.check_learnt_by_vllm()
    proof.check_answers()
    proof.check_distances()


def test_a_model_that_vllm_rounds_as_it_loads(plain: Path, tmp_path: Path) -> None:
    """The store has the caches and the probe of the files as they are."""
    decoder = Decoder.load(str(plain), device="cpu", dtype="bfloat16")
    proof = Quantised(tmp_path, plain, decoder, LENGTHS, dtype="bfloat16", quantization="fp8_per_channel")
    proof.check_learnt_by_vllm()
    proof.check_answers()


def test_a_deep_model_is_admitted(tmp_path: Path) -> None:
    """In some of its many layers an activation is rounded the other way at another position."""
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8}
    plain = save_model(tmp_path / "plain", initializer_range=0.04, **shape)
    decoder = Decoder.load(str(plain), device="cpu", dtype="float32")
    deep = Quantised(tmp_path, save_int8(plain, tmp_path / "int8"), decoder, ())
    assert len(deep.rows.decoder.rotations) == 12


def test_each_way_to_quantise_has_caches_of_its_own(plain: Path) -> None:
    options: tuple[dict[str, Any], ...] = (
        {},
        {"quantization": "fp8_per_channel"},
        {"quantization": "online", "quantization_config": {"linear": "fp8_per_channel"}},
        {"quantization": "online", "quantization_config": {"linear": "fp8_per_channel", "ignore": ["*.o_proj"]}},
    )
    configs = [EngineArgs(str(plain), skip_tokenizer_init=True, **one).create_engine_config() for one in options]
    assert len({fingerprints(one)[0] for one in configs}) == 4


def test_a_checkpoint_that_quantises_its_kv_cache_is_refused(plain: Path, tmp_path: Path) -> None:
    """By vLLM itself, where the processor has no such cache."""
    model = save_int8(plain, tmp_path / "fp8-cache", fp8_cache=True)
    with pytest.raises(Exception, match=r"a quantised KV cache is not supported|FP8 KV cache on CPU requires"):
        Quantised(tmp_path, model, Decoder.load(str(plain), device="cpu"), ())

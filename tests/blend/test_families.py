"""What `blend models` and docs/models.md say of families is what their tiny models do now."""

import subprocess
import sys

import pytest
import transformers
from models import BASE, HEAD_DIM, tokenizer
from places import PYTHONPATH, REPOSITORY

from _families import FAMILIES, measure
from blend.model.decoder import Decoder
from blend.model.precision import bfloat16_gain
from blend.weights.catalog import measured

RESULTS = {one.family: one for one in measured().families}
SEES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_every_family_is_listed():
    assert set(RESULTS) == set(FAMILIES)


@pytest.mark.parametrize("title", FAMILIES)
def test_a_family_is_admitted_or_refused_as_listed(title):
    """If this fails after a change that admits more: scripts/gen_models_docs."""
    found, listed = measure(title), RESULTS[title]
    assert (found.reason, found.layers) == (listed.reason, listed.layers)
    assert "\n" not in found.reason
    for mine, theirs in ((found.all_rows, listed.all_rows), (found.scattered, listed.scattered)):
        assert (mine is None) == (theirs is None)
        assert mine is None or max(mine, theirs or 0) < 1e-5


def test_the_page_is_what_was_measured():
    command = [sys.executable, str(REPOSITORY / "scripts" / "gen_models_docs"), "--check"]
    done = subprocess.run(command, env={"PYTHONPATH": PYTHONPATH}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_that_also_sees_images_is_read_for_its_text(tmp_path):
    """Ministral 3's: transformers has no causal language model under its name."""
    text = {"model_type": "ministral3", "head_dim": HEAD_DIM, **BASE}
    seen = {"model_type": "pixtral", "image_size": 32, "patch_size": 16, **SEES}
    config = transformers.Mistral3Config(text_config=text, vision_config=seen)
    transformers.Mistral3ForConditionalGeneration(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    dec = Decoder.load(str(tmp_path), dtype="float32")
    assert len(dec.rotations) == BASE["num_hidden_layers"]


def test_sizes_may_differ_from_layer_to_layer():
    """Gemma 3n lists the MLP's size for each layer."""
    config = transformers.Gemma3nTextConfig(hidden_size=64, intermediate_size=[80, 96], num_hidden_layers=2)
    assert isinstance(config.intermediate_size, list)
    assert bfloat16_gain(config) == 1.0

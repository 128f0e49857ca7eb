"""Models that cannot be blended are refused by measurement, in one line that names the model and the remedy."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blends import refused
from models import BASE, CORE, LAYERS, Family, build, tokenizer
from test_fingerprint import saved

from blend.errors import BlendError, ConfigError, UnsupportedModelError
from blend.model.admission import check_layer_kinds
from blend.model.decoder import Decoder, pick_device
from blend.model.precision import pick_dtype

MOVED = "cannot be moved to another position"
NOT_DRIVEN = "its attention cannot be driven"
RECURRENT = "does not continue from a given state over several rows"
JAMBA = {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}
MPT = {"d_model": 64, "n_heads": 4, "n_layers": LAYERS}
MODELS = {"GPT2": "GPT2LMHeadModel", "Llama4Text": "Llama4ForCausalLM"}


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("GPT2", {}, MOVED),
        ("OPT", {"ffn_dim": 80}, MOVED),
        ("Bloom", {}, NOT_DRIVEN),
        ("Falcon", {}, NOT_DRIVEN),
        ("Falcon", {"alibi": True}, NOT_DRIVEN),
        ("Mpt", MPT, NOT_DRIVEN),
        ("Mamba", {}, RECURRENT),
        ("Jamba", JAMBA, RECURRENT),
        ("Llama4Text", {"num_local_experts": 2}, "chunked_attention"),
    ],
)
def test_a_model_that_cannot_be_blended_is_refused(kind, options, reason):
    model = build(Family(f"{kind}Config", MODELS.get(kind, f"{kind}ForCausalLM"), options))
    with refused(UnsupportedModelError, f"tiny.*{reason}.*use full prefill"):
        Decoder(model, tokenizer(), "tiny")
    ids = torch.arange(3, 9)[None]
    assert model(input_ids=ids).logits.isfinite().all(), "the model is left usable"


def _add_neighbours(mlp: Any, args: tuple[torch.Tensor]) -> torch.Tensor:
    """Right in full prefill, wrong over chosen rows."""
    return args[0] + torch.nn.functional.pad(args[0], (0, 0, 1, 0))[:, :-1]


def test_a_model_that_mixes_rows_outside_attention_is_refused():
    """Every row sees its neighbour: nothing in the configuration says so, the measurement does."""
    model = build(CORE["llama"])
    model.model.layers[2].mlp.register_forward_pre_hook(_add_neighbours)
    with pytest.raises(UnsupportedModelError, match=r"secretive: blended prefill differs .* use full prefill"):
        Decoder(model, tokenizer(), "secretive")


def test_a_model_without_a_list_of_layers_is_refused():
    model = build(CORE["llama"])
    model.config.num_hidden_layers = LAYERS + 1
    with pytest.raises(UnsupportedModelError, match="has no list of 5 decoder layers"):
        Decoder(model, tokenizer(), "llama")


def test_layers_of_an_unknown_kind_are_named_even_if_transformers_has_no_cache_for_them():
    with refused(UnsupportedModelError, "odd has layers of type memory, whose state .* use full prefill"):
        check_layer_kinds(SimpleNamespace(layer_types=["full_attention", "memory"]), "odd")


def test_a_directory_that_holds_no_model_is_a_configuration_error(tmp_path):
    with refused(ConfigError, "holds no causal language model"):
        Decoder.load(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", {"hidden_act": "nonesuch"}),
        ("config.json", {"num_attention_heads": "four"}),
        ("config.json", {"num_key_value_heads": 0}),
        ("config.json", {"hidden_size": 32}),
        ("config.json", {"dtype": "float99"}),
        ("config.json", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}),
        ("tokenizer.json", {}),
        ("model.safetensors", {}),
    ],
    ids=str,
)
def test_a_damaged_model_directory_is_a_configuration_error(tmp_path, file, content):
    saved(tmp_path)
    damaged = {**json.loads((tmp_path / file).read_text()), **content} if content else {}
    (tmp_path / file).write_text(json.dumps(damaged))
    with refused(ConfigError, "holds no causal language model"):
        Decoder.load(str(tmp_path), device="cpu")


def test_a_saved_model_is_loaded_under_its_name(tmp_path):
    loaded = Decoder.load(str(saved(tmp_path)), name="tiny", device="cpu")
    direct = Decoder(build(CORE["llama"]), tokenizer(), "tiny")
    assert loaded.name == "tiny"
    assert (loaded.dtype, loaded.device.type) == (torch.float32, "cpu")
    assert loaded.fingerprint != direct.fingerprint  # one is known by its files, the other by its parameters
    assert loaded.context_length == BASE["max_position_embeddings"]


def test_devices_and_dtypes_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match="unknown device 'tpux'"):
        pick_device("tpux")
    with pytest.raises(ConfigError, match="unknown dtype 'int8'"):
        pick_dtype("int8", torch.device("cpu"))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="use --device cpu"):
            pick_device("cuda")
    assert pick_dtype("auto", torch.device("cuda")) is torch.bfloat16


def test_every_error_has_an_exit_code_of_its_own():
    codes = [error.exit_code for error in (BlendError, *BlendError.__subclasses__())]
    assert len(codes) == len(set(codes))
    assert 0 not in codes

"""Linear layers with their weights in oneDNN's order: the same results, in every family; and what stays as it was."""

import copy
from weakref import ref

import pytest
import torch
from blends import greedy
from cases import SELECTORS, blended, make_layout
from dense_reference import assert_close
from models import FAMILIES, build, decoder, tokenizer
from towns import document
from transformers import AutoModelForCausalLM

from blend.model import cpu
from blend.model.cpu import PackedLinear, packed, replace_linear
from blend.model.decoder import Decoder
from blend.model.fingerprint import parameters_digest

LAYOUT = make_layout()
needs_onednn = pytest.mark.skipif(not isinstance(packed(torch.nn.Linear(2, 2)), PackedLinear), reason="no oneDNN")


class Own(torch.nn.Linear):
    """A layer of somebody's own."""


@needs_onednn
@pytest.mark.parametrize("rows", [0, 1, 2, 45, 300])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@torch.inference_mode()
def test_the_product_is_the_same(rows, bias, dtype, tolerance):
    torch.manual_seed(rows)
    layer = torch.nn.Linear(48, 80, bias=bias, dtype=dtype)
    x = torch.randn(1, rows, 48).to(dtype)
    mine, exact = packed(layer), copy.deepcopy(layer).double()(x.double())
    found = mine(x)
    assert (found.shape, found.dtype) == ((1, rows, 80), dtype)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)
    assert torch.equal(mine.weight.to_dense(), layer.weight)


@needs_onednn
def test_plain_layers_are_replaced_and_others_stay():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Own(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 2)))
    half = torch.nn.Linear(4, 4, dtype=torch.float64)
    numbers = sum(part.numel() for part in model.parameters())
    replace_linear(model, packed)
    assert [type(one) for one in (model[0], model[1], model[2][0])] == [PackedLinear, Own, PackedLinear]
    assert sum(part.numel() for part in model.parameters()) == numbers
    assert packed(half) is half


def test_without_the_private_functions_layers_stay(monkeypatch):
    layer = torch.nn.Linear(4, 4)
    for name in ("PACK", "MULTIPLY"):
        with monkeypatch.context() as patch:
            patch.setattr(cpu, name, "none_of_this_name")
            assert packed(layer) is layer


@needs_onednn
@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_every_family_gives_the_same_with_packed_weights(name):
    plain, model = decoder(name), build(FAMILIES[name])
    replace_linear(model, packed)
    mine = Decoder(model, tokenizer(), name, weights=parameters_digest(plain.model))
    expected, found = (blended(one, LAYOUT, SELECTORS["hkvd"]) for one in (plain, mine))
    assert_close(found.logits, expected.logits)
    assert greedy(found, 6) == greedy(expected, 6)


@needs_onednn
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_model_has_packed_weights_and_the_fingerprint_of_the_plain_one(model, dtype):
    loaded = Decoder.load(model, device="cpu", dtype=dtype)
    kinds = {type(one) for one in loaded.model.modules() if hasattr(one, "in_features")}
    assert kinds == {type(packed(torch.nn.Linear(2, 2, dtype=loaded.dtype)))}
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=loaded.dtype)
    assert parameters_digest(loaded.model) == parameters_digest(plain)
    ids = loaded.tokenizer(document("harbour", 7), return_tensors="pt").input_ids
    with torch.inference_mode():
        mine, theirs = loaded.model(ids).logits.float(), plain(ids).logits.float()
    assert float((mine - theirs).norm() / theirs.norm()) < (1e-5 if dtype == "float32" else 0.02)


def test_a_model_never_has_all_its_layers_twice():
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(5)))
    before = [ref(layer) for layer in model]
    alive = list[int]()

    def made(layer: torch.nn.Linear) -> torch.nn.Module:
        alive.append(sum(one() is not None for one in before))
        return torch.nn.Identity()

    replace_linear(model, made)
    assert alive == [5, 4, 3, 2, 1]

"""The conversion, on a tiny random Llama written as GGUF by the format's own package, and once on real weights."""

import importlib.util

import pytest
import torch
from models import FAMILIES, build
from tokenizers import pre_tokenizers

from blend.errors import WeightsError
from blend.weights import resolve_model
from blend.weights.fetch import convert_gguf, require_converter

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "<|end|>"]


def tiny_llama(tie: bool = True):
    return build(FAMILIES["llama"], vocab_size=len(TOKENS), tie_word_embeddings=tie)


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a rotary projection from transformers' halves to the pairs of the GGUF format."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(model, path, noise: float) -> None:
    """The model as GGUF, with LM head, and with a table of embeddings that is `noise` away from it."""
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 1) + [3])
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(len(TOKENS) - 1)
    writer.add_eos_token_id(len(TOKENS) - 1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    torch.manual_seed(6)
    for name, tensor in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleave(tensor, len(tensor) // config.head_dim)
        if "embed_tokens" in name:
            tensor = tensor + noise * torch.randn_like(tensor)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def converted(tmp_path, capfd, model, noise, dtype="float32"):
    write_gguf(model, tmp_path / "model.gguf", noise)
    capfd.readouterr()
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out", dtype)
    assert capfd.readouterr() == ("", ""), "converting must not talk to the terminal"
    return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()


def logits(model):
    with torch.no_grad():
        return model(torch.arange(40)[None] * 6 % len(TOKENS)).logits


def test_the_converted_model_computes_the_same(tmp_path, capfd):
    model = tiny_llama()
    loaded = converted(tmp_path, capfd, model, noise=0.001)
    assert loaded.config.tie_word_embeddings
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert not hasattr(loaded.config, "quantization_config")
    # The head's table is the finer one: nothing of the noise is left.
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-4, rtol=1e-4)


def test_tables_that_differ_stay_apart(tmp_path, capfd):
    model = tiny_llama(tie=False)
    loaded = converted(tmp_path, capfd, model, noise=0.0)
    assert not loaded.config.tie_word_embeddings
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-4, rtol=1e-4)


def test_bfloat16_and_the_tokenizer(tmp_path, capfd):
    loaded = converted(tmp_path, capfd, tiny_llama(), 0.001, "bfloat16")
    assert loaded.dtype == torch.bfloat16
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("hello", add_special_tokens=False).input_ids
    assert [TOKENS[i] for i in ids] == ["he", "ll", "o"]
    assert tokenizer.decode(ids) == "hello"


def test_no_gguf_file(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"not a model at all" * 100)
    with pytest.raises(WeightsError, match=r"cannot convert model\.gguf") as caught:
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(WeightsError, match=r"gguf and accelerate .*pip install .*offline"):
        require_converter()


@pytest.mark.real
def test_real_weights_load_and_speak():
    directory = resolve_model("smollm2-135m")
    assert resolve_model("smollm2-135m") == directory
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        next_id = int(model(ids).logits[0, -1].argmax())
    assert tokenizer.decode(next_id) == " Paris"

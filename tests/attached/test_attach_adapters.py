"""`blend.attach` on models with adapters: caches belong to the adapters that computed them. PEFT where it is installed."""

import pytest
import torch
from test_attach import PLAIN, TEXTS, answered, prompt

import blend
from blend import BlendConfig, Decoder
from blend.errors import ConfigError
from tests.models import FAMILIES, build, tokenizer

ADAPTERS = ("first", "second")


class AdaptedLinear(torch.nn.Module):
    """A linear layer with two adapters, with the settings that PEFT's layers have."""

    def __init__(self, linear, seed):
        super().__init__()
        self.base_layer = linear
        draw = torch.Generator().manual_seed(seed)
        shape = linear.weight.shape
        deltas = {name: torch.nn.Parameter(torch.randn(shape, generator=draw) * 0.2) for name in ADAPTERS}
        self.deltas = torch.nn.ParameterDict(deltas)
        self._active_adapter = ["first"]
        self._disable_adapters = False
        self.scaling = dict.fromkeys(ADAPTERS, 1.0)

    @property
    def disable_adapters(self):
        return self._disable_adapters

    def forward(self, rows):
        out = self.base_layer(rows)
        if self.disable_adapters:
            return out
        for name in self._active_adapter:
            out = out + self.scaling[name] * torch.nn.functional.linear(rows, self.deltas[name])
        return out


class WrappedModel(torch.nn.Module):
    """A wrapper around a model with adapters, as `PeftModel` is one."""

    def __init__(self):
        super().__init__()
        self.base_model = build(FAMILIES["llama"])
        for seed, layer in enumerate(self.base_model.model.layers):
            layer.self_attn.v_proj = AdaptedLinear(layer.self_attn.v_proj, seed)

    def get_base_model(self):
        return self.base_model

    def generate(self, *inputs, **options):
        return self.base_model.generate(*inputs, **options)

    def set(self, **settings):
        for layer in self.base_model.model.layers:
            for name, value in settings.items():
                setattr(layer.self_attn.v_proj, name, value)


def wrapped(**settings):
    model = WrappedModel()
    model.set(**settings)
    return model


SETTINGS = [
    {"_active_adapter": ["second"]},
    {"_active_adapter": ["first", "second"]},
    {"_disable_adapters": True},
    {"scaling": {"first": -2.0, "second": 1.0}},
]


def test_an_adapter_that_is_switched_uses_no_rows_of_another():
    model = wrapped()
    with blend.attach(model, tokenizer(), config=PLAIN) as attached:
        attached.learn(*TEXTS)
        before = answered(model, prompt(1, 0))
        for settings in SETTINGS:
            model.set(_active_adapter=["first"], _disable_adapters=False, scaling=dict.fromkeys(ADAPTERS, 1.0))
            model.set(**settings)
            assert answered(model, prompt(1, 0)) == answered_anew(settings)
            assert attached.last.hits >= 2
            assert attached.last.learned >= 2  # computed anew
            answered(model, prompt(1, 0))
            assert attached.last.learned == 0
        model.set(scaling=dict.fromkeys(ADAPTERS, 1.0))
        assert answered(model, prompt(1, 0)) == before
        assert attached.last.learned == 0


def answered_anew(settings):
    model = wrapped(**settings)
    with blend.attach(model, tokenizer(), config=PLAIN) as attached:
        attached.learn(*TEXTS)
        return answered(model, prompt(1, 0))


def test_a_store_keeps_the_adapters_apart():
    prints = [Decoder(wrapped(**settings).base_model, tokenizer()).fingerprint for settings in [{}, *SETTINGS, {}]]
    assert len(set(prints[:-1])) == 1 + len(SETTINGS)
    assert prints[0] == prints[-1]


def steered(module, inputs, outputs):
    """A hook of the user's, which changes what a layer gives."""
    return (outputs[0] + 0.5, *outputs[1:]) if isinstance(outputs, tuple) else outputs + 0.5


def test_hooks_that_come_later_are_obeyed(tmp_path):
    model = build(FAMILIES["llama"])
    ids = prompt(1, 0)
    plain = answered(model, ids)
    hook = model.model.layers[1].register_forward_hook(steered)
    expected = answered(model, ids)
    assert expected != plain
    with pytest.raises(ConfigError, match="attach without a store, or remove the hooks"):
        blend.attach(model, tokenizer(), tmp_path / "store")
    hook.remove()
    with blend.attach(model, tokenizer(), config=PLAIN) as attached:
        attached.learn(*TEXTS)
        blended = answered(model, ids)
        hook = model.model.layers[1].register_forward_hook(steered)
        assert answered(model, ids) == expected
        assert "hooks" in attached.last.reason
        hook.remove()
        assert answered(model, ids) == blended
        model.generate(ids, max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True)
        assert answered(model, ids) == blended
        assert attached.last.hits >= 2


def test_a_reproducible_attachment_learns_nothing_from_prompts():
    model = build(FAMILIES["llama"])
    with blend.attach(model, tokenizer(), config=BlendConfig(correction=False, reproducible=True)) as attached:
        answers = [answered(model, prompt(1, 0, question=2)) for _ in range(4)]
        assert attached.last.learned == attached.last.hits == 0
        assert answers == answers[:1] * 4


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT 0.21 with transformers 5.24
def test_a_lora_of_peft():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
    model = peft.get_peft_model(build(FAMILIES["llama"]), peft.LoraConfig(**config)).eval()
    model.add_adapter("other", peft.LoraConfig(**config))
    ids = torch.cat([prompt(1, 0)] * 2)
    of_both = answered(model, ids, adapter_names=["default", "other"])
    with blend.attach(model, tokenizer(), config=PLAIN) as attached:
        attached.learn(*TEXTS)
        answered(model, ids)
        assert attached.last.hits >= 2
        model.set_adapter("other")
        answered(model, ids)
        assert attached.last.learned >= 2
        model.set_adapter("default")
        assert answered(model, ids, adapter_names=["default", "other"]) == of_both
        assert "hooks" in attached.last.reason

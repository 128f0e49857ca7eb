"""Which fast ways of a GPU a decoder takes."""

from typing import Any

import pytest
import torch
from models import CORE, build, decoder
from transformers import LlamaForCausalLM

import blend.model.device_path as device_path
from blend.model.decoder import Decoder
from blend.model.device_path import Ways, take_fast_ways, ways_of
from blend.model.fused import FusedModules
from blend.model.tried import device_ways


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, placing: str | None = None, fused: str | None = None) -> Decoder:
    """A decoder that believes to be on a GPU, with these faults of its kernels."""

    def modules(layers: torch.nn.Module) -> FusedModules:
        if fused is not None:
            raise RuntimeError(fused)
        return FusedModules([(layers, layers.forward)])

    made = Decoder(decoder("llama").model)
    monkeypatch.setattr(Decoder, "device", torch.device("cuda"))
    monkeypatch.setattr(device_path, "placing_fault", lambda *_: placing)
    monkeypatch.setattr(FusedModules, "of", modules)
    monkeypatch.setattr(Decoder, "seconds_of", lambda self, rows: 0.03 + rows * 3e-5)
    monkeypatch.setattr(device_path, "RowGraphs", lambda *_: type("Graphs", (), {"off": None, "captured": ()})())
    return made


@pytest.mark.parametrize(("path", "used"), [("auto", "on"), ("eager", "off")])
def test_what_is_in_use(path, used, monkeypatch, caplog):
    dec = on_a_gpu(monkeypatch)
    take_fast_ways(dec, path)
    assert ways_of(dec) == Ways(used, used, used)
    assert not caplog.records


@pytest.mark.parametrize(
    ("kernel", "ways", "words"),
    [
        ("placing", Ways("off", "on", "on"), "plain torch places chunks on this machine, which is slower"),
        ("fused", Ways("on", "on", "off"), "passes use the model's own norms and activations, which are slower"),
    ],
)
def test_a_fault_switches_one_way_off(kernel, ways, words, monkeypatch, caplog):
    dec = on_a_gpu(monkeypatch, **{kernel: "it differs from plain torch"})
    take_fast_ways(dec)
    assert ways_of(dec) == ways
    (message,) = caplog.messages
    assert message == f"kvblend: {words}: it differs from plain torch (please report it with `blend env`)"


def test_blending_must_save_what_another_pass_costs(monkeypatch):
    assert Decoder(decoder("llama").model).pass_rows == 0.0
    assert on_a_gpu(monkeypatch).pass_rows == pytest.approx(2 * (0.03192 / 0.09144 * 2048 - 64))


def test_changed_weights_need_new_graphs(monkeypatch):
    dec = Decoder(build(CORE["llama"]))
    on_a_gpu(monkeypatch)
    take_fast_ways(dec)
    graphs = dec.graphs
    dec.follow_weights()
    assert dec.graphs is graphs
    dec.layers[0].mlp.down_proj.weight.add_(1.0)
    dec.follow_weights()
    assert dec.graphs is not graphs


def test_a_machine_tries_a_graph_before_it_promises_one(monkeypatch):
    class Graphs:
        off: str | None = None
        captured = ()

        def __init__(self, *_: Any) -> None:
            pass

        def capture_next(self) -> None:
            self.off = "not permitted"

    dec = on_a_gpu(monkeypatch)
    monkeypatch.setattr("blend.model.tried.Decoder", lambda *_, **__: dec)
    monkeypatch.setattr(device_path, "RowGraphs", Graphs)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(LlamaForCausalLM, "to", lambda self, *_: self)
    assert device_ways() == Ways("on", "not permitted", "on")


def test_a_cpu_has_none_of_them():
    dec = Decoder(decoder("llama").model)
    take_fast_ways(dec)
    assert (dec.placing, dec.graphs) == (None, None)
    assert torch.cuda.is_available() or device_ways() is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_everything_is_in_use_on_a_gpu():
    assert device_ways() == Ways("on", "on", "on")

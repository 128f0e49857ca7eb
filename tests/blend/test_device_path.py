"""Which fast ways of a GPU a decoder takes."""

import pytest
import torch
from models import decoder

import blend.model.device_path as device_path
from blend.model.decoder import Decoder
from blend.model.device_path import Ways, take_fast_ways, ways_of
from blend.model.fused import FusedModules
from blend.model.tried import device_ways


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, fault: str | None) -> Decoder:
    """A decoder that believes to be on a GPU, whose placing kernel has this fault."""
    made = Decoder(decoder("llama").model)
    monkeypatch.setattr(Decoder, "device", torch.device("cuda"))
    monkeypatch.setattr(device_path, "placing_fault", lambda *_: fault)
    monkeypatch.setattr(FusedModules, "of", classmethod(lambda cls, layers: cls([(layers, layers.forward)])))
    monkeypatch.setattr(Decoder, "seconds_of", lambda self, rows: 0.03 + rows * 3e-5)
    monkeypatch.setattr(device_path, "RowGraphs", lambda *_: type("Graphs", (), {"off": None, "captured": ()})())
    return made


def test_what_is_in_use(monkeypatch, caplog):
    dec = on_a_gpu(monkeypatch, None)
    take_fast_ways(dec)
    assert ways_of(dec) == Ways("on", "on", "on")
    assert dec.placing is None
    assert not caplog.records


def test_a_fault_switches_one_way_off(monkeypatch, caplog):
    dec = on_a_gpu(monkeypatch, "int8 chunks on the GPU come out different")
    take_fast_ways(dec)
    assert ways_of(dec) == Ways("off", "on", "on")
    assert dec.placing == "torch"
    assert [record.message for record in caplog.records] == [
        "kvblend: plain torch places chunks on this machine, which is slower: int8 chunks on the GPU come out different "
        "(please report it with `blend env`)"
    ]


def test_a_wrong_kernel_leaves_the_models_own_modules(monkeypatch, caplog):
    dec = on_a_gpu(monkeypatch, None)

    def refuse(layers: object) -> FusedModules:
        raise RuntimeError("the kernel of RMSNorm differs from plain torch")

    monkeypatch.setattr(FusedModules, "of", refuse)
    take_fast_ways(dec)
    assert ways_of(dec) == Ways("on", "on", "off")
    assert [record.message for record in caplog.records] == [
        "kvblend: passes use the model's own norms and activations, which are slower: the kernel of RMSNorm differs from "
        "plain torch (please report it with `blend env`)"
    ]


def test_eager_does_without(monkeypatch):
    dec = on_a_gpu(monkeypatch, None)
    take_fast_ways(dec, "eager")
    assert ways_of(dec) == Ways("off", "off", "off")


def test_blending_must_save_what_another_pass_costs(monkeypatch):
    assert Decoder(decoder("llama").model).pass_rows == 0.0
    assert on_a_gpu(monkeypatch, None).pass_rows == pytest.approx(2 * (0.03192 / 0.09144 * 2048 - 64))


def test_a_cpu_has_none_of_them():
    dec = Decoder(decoder("llama").model)
    take_fast_ways(dec)
    assert (dec.placing, dec.graphs) == (None, None)
    assert torch.cuda.is_available() or device_ways() is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_everything_is_in_use_on_a_gpu():
    assert device_ways() == Ways("on", "on", "on")

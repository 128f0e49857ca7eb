"""The check of the placing kernel that runs before a GPU's first prompt: it passes here, and finds what is wrong."""

import pytest
import torch

from blend_kernels import LayerShape, Turn, placing_fault, placing_launch

TURN = Turn(10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8))
LAYERS = [
    (LayerShape(2, 16, 1, 24), TURN, None),
    (LayerShape(0, 0, 0, 0), None, None),
    (LayerShape(1, 40, 1, 16), Turn(TURN.inv_freq, True, 24), TURN),
]


def faults(device, dtype=torch.float32):
    moved = [
        (shape, *(None if turn is None else turn._replace(inv_freq=turn.inv_freq.to(device)) for turn in turns))
        for shape, *turns in LAYERS
    ]
    return placing_fault(moved, dtype, torch.device(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_is_right(dtype, device):
    assert faults(device, dtype) is None


def lost_bit(table, keys, values):
    values[0, 20].view(torch.int32)[0] ^= 1


def turned_too_far(table, keys, values):
    keys[:, 20] *= 1.01


def wrong_zero(table, keys, values):
    values[0, 20] += table.shape.packing == "int4"


def no_compiler(table, keys, values):
    raise RuntimeError("no such instruction\nand more")


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (lost_bit, "plain chunks in page-locked memory come out different"),
        (turned_too_far, "plain chunks in page-locked memory come out different"),
        (wrong_zero, "int4 chunks in page-locked memory come out different"),
        (no_compiler, "no such instruction"),
    ],
)
def test_a_wrong_kernel_is_found(wrong, fault, monkeypatch, device):
    launch = placing_launch.launch_placing

    def launch_wrongly(table, layer, keys, values, *more):
        launch(table, layer, keys, values, *more)
        wrong(table, keys, values)

    monkeypatch.setattr(placing_launch, "launch_placing", launch_wrongly)
    assert faults(device) == fault

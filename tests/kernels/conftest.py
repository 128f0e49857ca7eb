"""The kernels run on a GPU where there is one, else under Triton's interpreter, which must be chosen before Triton is used."""

import importlib
import os
import sys

import pytest
import torch

from tests.kernels.dense import DEVICE

if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    if "triton" in sys.modules:
        # transformers imports Triton with its models; what Triton's library decorated then would be compiled, not interpreted
        import triton.language as tl

        standard = importlib.reload(sys.modules["triton.language.standard"])
        for name in [name for name in vars(tl) if not name.startswith("_") and hasattr(standard, name)]:
            setattr(tl, name, getattr(standard, name))


@pytest.fixture
def device():
    return DEVICE


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    return request.param


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def poisoned():
    """Within a test, memory that is allocated and not written reads as NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    assert torch.ones(1).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)

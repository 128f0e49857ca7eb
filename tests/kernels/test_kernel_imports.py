"""In processes of their own: what an import loads."""

from places import run_python

USE = "k = torch.randn(1, 1, 4, 8); p = blend_kernels.Positions(torch.arange(4))"
CALLS = {
    "selective_attention": "(k, k, k, p)",
    "attention_mass": "(k, k, p)",
    "decode_attention": "(k[:, :, -1:], k, k)",
    "rms_norm": "(k, torch.ones(8), 1e-6)",
    "silu_mul": "(k, k)",
}


def loaded(code):
    """Top-level modules in memory after the code."""
    tail = "import sys; print(' '.join({name.split('.')[0] for name in sys.modules}))"
    run = run_python(f"{code}\n{tail}")
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_ops_on_a_cpu_leave_triton_alone():
    calls = "; ".join(f"blend_kernels.{op}{arguments}" for op, arguments in CALLS.items())
    assert "triton" not in loaded(f"import torch, blend_kernels; {USE}; {calls}")
    place = "check(MODELS['halves 8'], SETS['without positions'], 'int4', 'cpu', None, gain_dtype=FP32)"
    assert "triton" not in loaded(f"from tests.kernels.test_placing import *; {place}")

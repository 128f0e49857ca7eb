"""In processes of their own: what an import loads."""

import ast
import subprocess
import sys
from pathlib import Path

USE = "k = torch.randn(1, 1, 4, 8); p = torch.arange(4)"
CALLS = {
    "selective_attention": "(k, k, k, p)",
    "attention_mass": "(k, k, p)",
    "rotate_keys": "(k, 1, torch.ones(4))",
    "kv_deviation": "(None, None, k, k)",
    "rms_norm": "(k, torch.ones(8), 1e-6)",
    "silu_mul": "(k, k)",
}


def loaded(code: str) -> set[str]:
    """Top-level modules in memory after the code."""
    tail = "import sys; print(' '.join({name.split('.')[0] for name in sys.modules}))"
    path = f"import sys; sys.path[:0] = {sys.path!r}"
    run = subprocess.run([sys.executable, "-c", f"{path}\n{code}\n{tail}"], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_ops_on_a_cpu_leave_triton_alone():
    calls = "; ".join(f"blend_kernels.{op}{arguments}" for op, arguments in CALLS.items())
    assert "triton" not in loaded(f"import torch, blend_kernels; {USE}; {calls}")
    place = "check(MODELS['halves 8'], SETS['without positions'], 'int4', 'cpu', None, with_gain=True)"
    assert "triton" not in loaded(f"from tests.kernels.test_placing import *; {place}")


def test_what_the_package_holds_is_what_its_ops_need():
    """Tools of the repository stay out of the wheel: every module is reached from the public ops and the tuner."""
    import blend_kernels

    folder = Path(blend_kernels.__file__).parent
    modules = {path.stem: path for path in folder.glob("*.py")}
    reached, waiting = set(), ["__init__", "attention", "mass", "rotation", "deviation", "elementwise", "tune"]
    while waiting:
        name = waiting.pop()
        reached.add(name)
        tree = ast.parse(modules[name].read_text())
        imported = [
            str(n.module).removeprefix("blend_kernels.") for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)
        ]
        waiting += [found for found in imported if found in modules and found not in reached]
    assert reached == set(modules)

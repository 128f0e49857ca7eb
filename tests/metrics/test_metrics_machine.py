import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import blend
from blend.eval import machine
from blend.eval.machine import describe_machine


def test_the_machine_is_described_by_what_the_system_says():
    found = describe_machine()
    assert found.cpu
    assert 1 <= found.cores <= os.cpu_count()
    assert found.ram_bytes is None or found.ram_bytes > 2**20
    assert found.python == platform.python_version()
    assert found.versions["kvblend"] == blend.__version__
    import numpy as np
    import torch

    assert found.versions["numpy"] == np.__version__
    assert found.versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert describe_machine().threads == torch.get_num_threads()


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from blend.eval.machine import describe_machine; m = describe_machine();"
        "heavy = {'torch', 'triton', 'transformers', 'faiss', 'numpy'} & set(sys.modules);"
        "assert not heavy, heavy; assert m.threads == 3, m.threads"
    )
    result = subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "3"}, check=False)
    assert result.returncode == 0


def test_a_missing_package_has_no_version(monkeypatch):
    monkeypatch.setitem(machine.PACKAGES, "torch", ("surely-not-installed",))
    assert describe_machine().versions["torch"] is None
    assert "torch" not in describe_machine().summary()


def test_gpus_are_named_and_counted(monkeypatch):
    names = ["NVIDIA L4", "NVIDIA L4", "NVIDIA A100"]
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 3, get_device_name=names.__getitem__)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, get_num_threads=lambda: 5))
    found = describe_machine()
    assert found.gpu == "2 x NVIDIA L4, NVIDIA A100"
    assert found.threads == 5


def test_without_torch_nvidia_smi_is_asked(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert machine.nvidia_names() == "NVIDIA H200"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert machine.nvidia_names() is None

import os
import platform
import subprocess
import sys

import torch

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
    assert found.versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found.threads == torch.get_num_threads()


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from blend.eval.machine import describe_machine; m = describe_machine();"
        "heavy = {'torch', 'triton', 'transformers', 'faiss', 'numpy'} & set(sys.modules);"
        "assert not heavy, heavy; assert m.threads == 3, m.threads"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "3"}, check=True)


def test_gpus_are_named_and_what_is_missing_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "PACKAGES", ("surely-not-installed",))
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200'\necho 'NVIDIA L4'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = describe_machine()
    assert (found.gpu, found.versions["surely-not-installed"]) == ("NVIDIA H200, NVIDIA L4", None)
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert describe_machine().gpu is None

"""The machine and the versions that a measurement was made with.

Nothing heavy is imported: versions come from package metadata, and torch is asked only when it is already loaded.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from blend.text import counted
from blend.version import __version__

PACKAGES = ("torch", "triton", "transformers", "faiss-cpu", "numpy", "sentence-transformers")


@dataclass(frozen=True)
class Machine:
    """What a measured number depends on.

    cpu: model name. cores: that this process may use. ram_bytes, gpu: None where unknown or missing. threads: torch's, or
    OMP_NUM_THREADS while torch is not loaded. versions: package -> version, None for one that is not installed.
    """

    cpu: str
    cores: int
    ram_bytes: int | None
    gpu: str | None
    os: str
    python: str
    threads: int | None
    versions: Mapping[str, str | None]

    def summary(self) -> str:
        """One line for the foot of a table or picture."""
        threads = self.threads if self.threads != self.cores else None
        versions = {name: self.versions.get(name) for name in ("kvblend", "torch", "transformers")}
        parts = (
            self.cpu,
            counted(self.cores, "core"),
            counted(threads, "thread") if threads else None,
            f"{self.ram_bytes / 2**30:.0f} GiB" if self.ram_bytes else None,
            self.gpu,
            *(f"{name} {version}" for name, version in versions.items() if version),
        )
        return ", ".join(filter(None, parts))


def describe_machine() -> Machine:
    """The machine this process runs on, now: in milliseconds, or in at most 10 s where nvidia-smi hangs."""
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        ram_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
        gpu=_gpu_names(),
        os=platform.platform(),
        python=platform.python_version(),
        threads=_threads(),
        versions={"kvblend": __version__, **{name: _version(name) for name in PACKAGES}},
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine() or "unknown CPU"


def _gpu_names() -> str | None:
    """Models of the GPUs, as nvidia-smi lists them."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ", ".join(result.stdout.splitlines()) or None


def _threads() -> int | None:
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    setting = os.environ.get("OMP_NUM_THREADS", "")
    return int(setting) if setting.isdecimal() else None

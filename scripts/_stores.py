"""The stores that TTFT is measured with: filled once, emptied into the next, so that the caches are held once."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from blend.blender import Blender
from blend.chunks.correction import POSITION_FEATURES, Bounds, KVCorrection, LayerCorrection
from blend.chunks.fit import RANK
from blend.chunks.library import with_surrogate
from blend.config import CorpusConfig
from blend.store import ChunkStore
from blend.types import ChunkCache, PromptLayout, Stopwatch

if TYPE_CHECKING:
    from blend.model.cache import LayerRotation
    from blend.model.decoder import Decoder

SAMPLE = 256 << 20  # bytes that a bandwidth is measured on, at most


def fill(
    decoder: Decoder, store: ChunkStore, layout: PromptLayout, others: Sequence[tuple[int, ...]], correction: str
) -> None:
    """Compute every cache of the prompt's chunks, with a surrogate context out of `others`, and a KV correction.

    correction: "neutral" has the cost of a fitted one and adds nothing, since random weights have nothing to predict.
    "fitted" fits one on the chunks. "off" has none.
    """
    blender = Blender(decoder, store)
    with_surrogate(blender.library(layout.kept_behind), others, CorpusConfig().surrogate_tokens)
    library = blender.library(layout.kept_behind)
    library.compute(library.missing(layout.chunks))
    if correction == "fitted":
        blender.calibrate(layout.prefix, layout.chunks)
    elif correction == "neutral":
        content = neutral_correction(decoder).to_bytes()
        for contextual in (False, True):
            store.write_artifact(library.encoder(contextual=contextual).identity.correction_name, content)


def neutral_correction(decoder: Decoder) -> KVCorrection:
    """As wide and of the rank that fitting gives, in every layer but the first; it predicts no gain anywhere."""
    return KVCorrection((None, *map(_neutral_layer, decoder.rotations[1:])), before=1 << 20, length=1 << 20)


def _neutral_layer(rotation: LayerRotation) -> LayerCorrection:
    width, (heads, dim) = rotation.width, rotation.key_shape
    down = torch.randn(width + POSITION_FEATURES, RANK, generator=torch.Generator().manual_seed(0)) / width**0.5
    up, centre, scale = torch.zeros(RANK, width), torch.zeros(width), torch.ones(width)
    return LayerCorrection(centre, scale, down, up, down.clone(), Bounds(1e6, 1.0, 1.0), heads * dim)


def move(source: ChunkStore, target: ChunkStore) -> None:
    """All artifacts and entries; an entry leaves `source` as soon as `target` has it."""
    for name in source.artifacts():
        content = source.read_artifact(name)
        if content is not None:
            target.write_artifact(name, content)
    for key in list(source.keys()):
        reader = source.open(key)
        if reader is None:
            continue
        with reader:
            keys, values = zip(*(reader.layer(index) for index in range(reader.layers)), strict=True)
            target.put(key, ChunkCache(keys, values, reader.start))
        del reader, keys, values
        source.delete(key)


def copy_rate(device: torch.device) -> float:
    """Bytes a second of a copy from memory to `device`, for a GPU from page-locked memory, median of five."""
    size = SAMPLE if device.type == "cuda" else SAMPLE // 4
    source = torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target, seconds = torch.empty(size, dtype=torch.uint8, device=device), []
    for _ in range(5):
        watch = Stopwatch(device)
        target.copy_(source)
        seconds.append(watch.total())
    return size / median(seconds)


def read_rate(folder: Path, *, cold: bool) -> float:
    """Bytes a second of reading a store's files one after another; cold: dropped from the page cache before."""
    if cold:
        drop_page_cache(folder)
    buffer, done = bytearray(16 << 20), 0
    watch = Stopwatch()
    for path in _files(folder):
        with path.open("rb", buffering=0) as file:
            while done < SAMPLE and (count := file.readinto(buffer)):
                done += count
    return done / watch.total()


def drop_page_cache(folder: Path) -> bool:
    """Have the system forget the contents of a store's files; whether it did, as far as it tells.

    A virtual machine's host may still hold what its guest has forgotten.
    """
    files = _files(folder)
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return bool(files) and all(not _in_page_cache(path) for path in files[:: max(1, len(files) // 16)])


def _in_page_cache(path: Path) -> bool:
    """Whether the system holds any page of a file in memory; True also where it cannot say."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    size, address = ctypes.c_size_t(path.stat().st_size), ctypes.c_void_p
    with path.open("rb") as file:
        start = address(libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), ctypes.c_long(0)))
    if start.value == address(-1).value:
        return True
    pages = (ctypes.c_ubyte * -(-size.value // mmap.PAGESIZE))()
    failed = libc.mincore(start, size, pages)
    libc.munmap(start, size)
    return bool(failed) or any(page & 1 for page in pages)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "objects").rglob("*") if path.is_file())


def file_system(folder: Path) -> str:
    """The kind of file system that a folder is on."""
    best, kind = -1, "unknown"
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        mount, found = line.split()[1:3]
        if folder.resolve().is_relative_to(mount) and len(mount) > best:
            best, kind = len(mount), found
    return kind


def lacks_room(folder: Path, nbytes: int) -> str | None:
    """Why so many bytes do not fit on the disk of `folder`, or None where they do."""
    free = shutil.disk_usage(folder).free
    return None if nbytes < free else f"needs {nbytes / 2**30:.0f} GiB on the disk, {free / 2**30:.0f} GiB are free"

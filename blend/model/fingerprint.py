"""Identifies a model's caches: a digest of its configuration and its weights.

For a model loaded from files it is the files' digest, computed once and cached until a file changes. For a model that was
built in memory, or changed since it was loaded, it is the digest of its parameters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open

from blend.files import cache_root, keep_value, read_values
from blend.weights.catalog import checkpoint_files

DIGESTS = "digests.json"
_BLOCK = 16 << 20
# Configuration entries that say where a model came from or how it runs, not what it computes.
_NOT_COMPUTED = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")


def model_fingerprint(config: Any, weights: str) -> str:
    """Hex digest of a weights digest and of all configuration entries that the computation depends on."""
    entries = config.to_dict()
    computed = {key: value for key, value in entries.items() if key not in _NOT_COMPUTED}
    text = json.dumps(computed, sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(f"{text}\n{weights}".encode())


def files_fingerprint(location: str) -> str | None:
    """The fingerprint of the model in these files, without loading it; None if files are missing."""
    from transformers import AutoConfig

    weights = checkpoint_digest(location)
    if not weights:
        return None
    config = AutoConfig.from_pretrained(location).get_text_config(decoder=True)
    return model_fingerprint(config, weights)


def parameters_digest(model: torch.nn.Module) -> str:
    """Digest of all current parameters and buffers; reads every byte."""
    digest = xxhash.xxh3_128()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        for part in _parts(tensor):
            dense = part.to_dense() if part.is_mkldnn else part
            numbers = dense.detach().contiguous().cpu()
            digest.update(numbers.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _parts(tensor: Any) -> Iterator[Any]:
    """The plain tensors that a tensor consists of; those of torchao hold numbers, scales and zero points."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _parts(getattr(tensor, name))


def unchanged_checkpoint_digest(model: torch.nn.Module) -> str | None:
    """Digest of the files that a model was loaded from, if its parameters are still those of the files; else None.

    So a model that somebody else has loaded uses the same caches as one that `Decoder.load` has loaded. Every byte of both is
    compared, in the model's dtype, up to the first difference.
    """
    location = str(getattr(model.config, "_name_or_path", ""))
    files = _weights(_folder_of(location)) if location else []
    shards = [file for file in files if file.suffix == ".safetensors"]
    stamps = tuple(map(_stamp, files))
    state = model.state_dict()
    is_plain = all(
        tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__") for tensor in state.values()
    )
    if not shards or not is_plain or not _holds(shards, state):
        return None
    return checkpoint_digest(location, unless_changed_since=stamps)


def _holds(shards: Sequence[Path], state: Mapping[str, torch.Tensor]) -> bool:
    """Whether the files hold these tensors and no others; a tensor that is tied to another may be missing."""
    equal = set[int]()
    for shard in shards:
        with safe_open(shard, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                tensor = state.get(name)
                if tensor is None or not torch.equal(tensors.get_tensor(name).to(tensor.dtype), tensor.cpu()):
                    return False
                equal.add(tensor.data_ptr())
    return all(tensor.data_ptr() in equal for tensor in state.values())


class WeightsWatch:
    """Notices that modules or parameters of a model were changed or replaced since this was made.

    A check takes 40 us for 32 layers: it compares the modules, and torch's counters of operations in place. Those do not count
    changes through `Tensor.data`, and tensors made in inference mode have none.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._members: list[dict[str, Any]] = []
        for module in model.modules():
            self._members += filter(None, (module._modules, module._parameters))
        self._before = list(map(dict, self._members))
        self._counted = [parameter for parameter in model.parameters() if not parameter.is_inference()]
        self._count = self._operations()

    @property
    def changed(self) -> bool:
        """Whether anything has changed."""
        try:
            return self._members != self._before or self._operations() != self._count
        except RuntimeError:  # equality of tensors, which are only compared if they are not the same
            return True

    def _operations(self) -> int:
        return sum(map(attrgetter("_version"), self._counted))


def checkpoint_stamps(location: str) -> tuple[str, ...]:
    """Name, size, inode and times of each weight file; empty if files are missing."""
    return tuple(_stamp(file) for file in _weights(_folder_of(location)))


def checkpoint_digest(location: str, *, unless_changed_since: tuple[str, ...] = ()) -> str | None:
    """Digest of the weight files of a model directory or of a cached HuggingFace id; None if files are missing.

    unless_changed_since: the `checkpoint_stamps` from before loading; if they differ now the result is None, because the loaded
    weights may be the old ones. File digests are remembered by stamp in kvblend's cache folder.
    """
    files = _weights(_folder_of(location))
    if not files or unless_changed_since not in ((), tuple(map(_stamp, files))):
        return None
    return xxhash.xxh3_128_hexdigest("\n".join(map(remembered_digest, files)).encode())


def remembered_digest(file: Path) -> str:
    """Digest of one file's bytes; where nothing is writable, it is read at every start."""
    path = cache_root() / DIGESTS
    name = f"{file.resolve().parent} {_stamp(file)}"
    digest = read_values(path, str).get(name)
    if digest is None:
        digest = file_digest(file)
        keep_value(path, name, digest)
    return digest


def _weights(folder: Path | None) -> list[Path]:
    if folder is None or (folder / "adapter_config.json").exists():  # an adapter's base model is elsewhere
        return []

    def find(name: str) -> Path | None:
        file = folder / name
        return file if file.is_file() else None

    return checkpoint_files(find) or []


def _folder_of(location: str) -> Path | None:
    if Path(location).is_dir():
        return Path(location)
    from transformers.utils import cached_file

    with suppress(OSError, ValueError):
        file = cached_file(location, "config.json", local_files_only=True)
        return Path(file).parent if file else None
    return None


def _stamp(file: Path) -> str:
    about = file.stat()
    return f"{file.name} {about.st_size} {about.st_ino} {about.st_mtime_ns} {about.st_ctime_ns}"


def file_digest(file: Path) -> str:
    """Digest of one file's bytes."""
    digest = xxhash.xxh3_128()
    with file.open("rb") as blocks:
        while block := blocks.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()

"""Which caches belong to a model that vLLM runs: its own, or those of the same files run by transformers, if shown to be alike.

The same weights need not give the same KV: vLLM may run them quantised, with other kernels, or under another rotation. So
caches made here are kept apart, always where vLLM is told to change something about the model, and otherwise unless the store
holds a probe of it, a few tokens' KV that transformers gave, and vLLM gives the same (`blend.chunks.encode`).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

from blend.model.fingerprint import files_fingerprint


class Fingerprints(NamedTuple):
    """Of a model's caches. shared: as transformers has them. own: of those that vLLM makes as it is configured here."""

    shared: str
    own: str

    @classmethod
    def of(cls, files: str, changed: Sequence[object] = ()) -> Fingerprints:
        """files: the fingerprint of the model's files. changed: what vLLM makes of them; if anything, nothing is shared."""
        told = repr([one for one in changed if one])
        own = sha256(f"vllm\n{files}\n{told}".encode()).hexdigest()[:32]
        return cls(own if any(changed) else files, own)


def fingerprints(config: Any) -> Fingerprints:
    """config: the `VllmConfig`. Raises ValueError, in one line, where the weights are no files of this machine."""
    model = config.model_config
    files = files_fingerprint(model.model)
    if files is None:
        raise ValueError(
            f"because the weights of {model.model} are not all files of this machine, so its caches have no name"
        )
    unread = config.load_config.load_format == "dummy" and "dummy weights"
    # What vLLM quantises as it loads is told by its options: the name may be "online" for all of them.
    changed = (model.quantization, model.quantization_config, model.hf_overrides, unread)
    return Fingerprints.of(files, changed)

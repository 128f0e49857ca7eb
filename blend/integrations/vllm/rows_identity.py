"""Which caches belong to a model that vLLM runs: its own, or those of the same files run by transformers, if shown to be alike.

The same weights need not give the same KV: vLLM may run them quantised, with other kernels, or under another rotation. So
caches made here are kept apart, unless the store holds a probe of that model, a few tokens' KV that transformers gave, and
vLLM gives the same. `blend.chunks.likeness` writes and compares probes.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, NamedTuple

from blend.model.fingerprint import files_fingerprint


class Fingerprints(NamedTuple):
    """Of a model's caches. shared: as transformers has them. own: of those that vLLM makes as it is configured here."""

    shared: str
    own: str

    @classmethod
    def of(cls, shared: str, quantization: str | None) -> Fingerprints:
        """quantization: that vLLM applies, by its name for it."""
        return cls(shared, sha256(f"vllm\n{shared}\n{quantization}".encode()).hexdigest()[:32])


def fingerprints(config: Any) -> Fingerprints:
    """config: the `VllmConfig`. Raises ValueError, in one line, where the weights are no files of this machine."""
    model = config.model_config
    shared = files_fingerprint(model.model)
    if shared is None:
        raise ValueError(
            f"because the weights of {model.model} are not all files of this machine, so its caches have no name"
        )
    return Fingerprints.of(shared, model.quantization)

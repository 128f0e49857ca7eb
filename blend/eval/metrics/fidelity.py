"""Distance of a method's next-token distributions to those of full recompute, along the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Rows taken together: bounds the float64 copies to some tens of MiB with the largest vocabularies.
_BLOCK = 16


def kl_divergence(reference_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL(reference || method) of next-token distributions in nats, float64 `[tokens]`, from logits `[tokens, vocab]`.

    Tokens that the reference excludes (logit minus infinity) add nothing; one that the method alone excludes makes it
    infinite. Raises `ValueError` for other shapes and for NaN, which means that a forward pass went wrong.
    """
    import torch

    _check(reference_logits, logits)
    blocks = [slice(start, start + _BLOCK) for start in range(0, len(logits), _BLOCK)]
    parts = [_block_divergence(reference_logits[block], logits[block]) for block in blocks]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)


def top1_agreement(reference_logits: torch.Tensor, logits: torch.Tensor) -> float | None:
    """Share of positions whose most likely token is the same, from logits `[tokens, vocab]`; None without positions."""
    _check(reference_logits, logits)
    if not len(logits):
        return None
    agree = reference_logits.argmax(-1) == logits.argmax(-1).to(reference_logits.device)
    return float(agree.double().mean())


def _block_divergence(reference_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    reference = reference_logits.double().log_softmax(-1)
    other = logits.to(reference_logits.device).double().log_softmax(-1)
    probability = reference.exp()
    terms = (probability * (reference - other)).masked_fill(probability == 0, 0.0)
    # Rounding may leave the sum of two equal distributions a hair below zero.
    return terms.sum(-1).clamp_min(0.0)


def _check(reference_logits: torch.Tensor, logits: torch.Tensor) -> None:
    if reference_logits.ndim != 2 or reference_logits.shape != logits.shape:
        raise ValueError(
            "logits must be [tokens, vocab] and of one shape, "
            f"not {tuple(reference_logits.shape)} and {tuple(logits.shape)}"
        )
    for name, values in (("reference", reference_logits), ("method", logits)):
        if values.isnan().any():
            raise ValueError(f"logits of the {name} contain NaN: its forward pass went wrong")

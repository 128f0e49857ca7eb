"""Full recompute: the model's own prefill of the same token ids, the yardstick of every measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from blend.model.cache import output_cache
from blend.model.row_decoder import check_ids
from blend.timing import Stopwatch
from blend.types import PromptLayout

if TYPE_CHECKING:
    from blend.model.decoder import Decoder


@dataclass
class FullPrefill:
    """A prompt prefilled by HuggingFace alone: its own attention, its own cache, the LM head on the last row only.

    logits: of the next token, `[1, vocab]`. first_token: their argmax. ttft_s: seconds to the first token's id on the host.
    """

    decoder: Decoder
    cache: Any
    logits: torch.Tensor
    first_token: int
    ttft_s: float

    @torch.inference_mode()
    def append(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Run further tokens `[1, n]` the model's own way; logits `[1, n, vocab]`."""
        driver = self.decoder.driver
        out = driver.run_whole(input_ids=token_ids, use_cache=True, **{driver.cache_argument: self.cache})
        return out.logits  # type: ignore[no-any-return]


@torch.inference_mode()
def full_prefill(decoder: Decoder, layout: PromptLayout) -> FullPrefill:
    """Prefill the whole prompt with the model's own forward pass. Raises `PromptError` for ids that the model does not have."""
    check_ids(decoder.vocabulary, layout.token_ids)
    watch = Stopwatch(decoder.device)
    ids = torch.tensor([layout.token_ids], device=decoder.device)
    out = decoder.driver.run_whole(input_ids=ids, use_cache=True, **decoder.last_row_only)
    logits = out.logits[:, -1]
    first_token = int(logits[0].argmax())
    return FullPrefill(decoder, output_cache(out), logits, first_token, watch.total())

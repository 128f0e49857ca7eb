"""From a prefilled cache to an answer, through `model.generate` with its logits processors and stopping criteria."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol

import torch

from blend.config import ANSWER_TOKENS
from blend.errors import ConfigError, UnsupportedModelError
from blend.limits import check_number

if TYPE_CHECKING:
    from blend.model.decoder import Decoder

SUPPORTED = ">=5.14,<6"  # of transformers, as the distribution requires it
OnText = Callable[[str], None]


class Continuable(Protocol):
    """A prefilled prompt that can go on: what decoding and teacher forcing need, blended or not."""

    @property
    def logits(self) -> torch.Tensor:
        """Of the first token to come, `[1, vocab]`."""
        ...

    def append(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Run `[1, n]` further tokens; their next-token logits `[1, n, vocab]`."""
        ...


@dataclass(frozen=True)
class Generation:
    """An answer. text: empty where the decoder has no tokenizer. token_ids: without the prompt.

    seconds: decoding time, the first token's choice included.
    """

    text: str
    token_ids: tuple[int, ...]
    seconds: float

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        further = len(self.token_ids) - 1
        return self.seconds / further if further > 0 else None


def generate(
    decoder: Decoder,
    prefilled: Continuable,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int = ANSWER_TOKENS,
    on_text: OnText | None = None,
    **options: Any,
) -> Generation:
    """Decode from a prefilled prompt, greedily unless `options` (those of `model.generate`) say otherwise.

    on_text: called with each piece of text as soon as it is final. The prompt is not run again: the first token comes from
    `prefilled.logits`. Raises `ConfigError` for options that ask for several sequences, for a length that is none, and for
    `on_text` of a decoder without a tokenizer.
    """
    if on_text is not None and decoder.tokenizer is None:
        raise ConfigError("this decoder has no tokenizer to make text with: leave out on_text, and read token_ids")
    if any((options.get(name) or 1) != 1 for name in ("num_beams", "num_return_sequences")):
        raise ConfigError("one sequence a prompt: num_beams and num_return_sequences must be 1")
    check_number("max_new_tokens", max_new_tokens)
    _require_custom_generate()
    begin = time.perf_counter()
    ids = torch.tensor([list(prompt_ids)], device=decoder.device)
    out = decoder.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        custom_generate=_decoding_loop(decoder, prefilled, on_text),
        **{"do_sample": False, "temperature": None, "top_p": None, "top_k": None, **options},
    )
    answer = out[0, ids.shape[1] :].tolist()
    text = decoder.tokenizer.decode(answer, skip_special_tokens=True) if decoder.tokenizer is not None else ""
    return Generation(text.strip(), tuple(answer), time.perf_counter() - begin)


def _decoding_loop(decoder: Decoder, prefilled: Continuable, on_text: OnText | None) -> Callable[..., torch.Tensor]:
    """A decoding method for `generate(custom_generate=...)` that starts from logits that are known already."""
    streamer = _streamer(decoder.tokenizer, on_text) if on_text else None

    def loop(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        if logits_processor is None or stopping_criteria is None or generation_config is None:
            raise _unknown_generate()
        logits = prefilled.logits
        while True:
            scores = logits_processor(input_ids, logits.float())
            token = _choose(scores, generation_config.do_sample)
            input_ids = torch.cat((input_ids, token), dim=1)
            if streamer is not None:
                streamer.put(token[0].cpu())
            if stopping_criteria(input_ids, None).all():
                break
            logits = prefilled.append(token)[:, -1]
        if streamer is not None:
            streamer.end()
        return input_ids

    return loop


def _require_custom_generate() -> None:
    from transformers import GenerationMixin

    if "custom_generate" not in inspect.signature(GenerationMixin.generate).parameters:
        raise _unknown_generate()


def _unknown_generate() -> UnsupportedModelError:
    return UnsupportedModelError(
        f"transformers {version('transformers')} does not hand over decoding as kvblend needs it; "
        f"install a version that it is made for: pip install 'transformers{SUPPORTED}'"
    )


def _choose(scores: torch.Tensor, sample: bool) -> torch.Tensor:
    if sample:
        return torch.multinomial(scores.softmax(-1), 1)
    return scores.argmax(-1, keepdim=True)


def _streamer(tokenizer: Any, on_text: OnText) -> Any:
    """The streamer of transformers, which waits for whole words and code points, calling `on_text` instead of printing."""
    from transformers import TextStreamer

    class CallbackStreamer(TextStreamer):  # type: ignore[misc]  # transformers is untyped here
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                on_text(text)

    return CallbackStreamer(tokenizer, skip_special_tokens=True)


@torch.inference_mode()
def teacher_forced_logits(prefilled: Continuable, answer_ids: Sequence[int]) -> torch.Tensor:
    """Logits that predict each token of a given answer, `[answer, vocab]` in float32.

    Appends all of the answer but its last token to the prefilled prompt.
    """
    first = prefilled.logits.float()
    if len(answer_ids) < 2:
        return first[: len(answer_ids)]
    ids = torch.tensor([list(answer_ids[:-1])], device=first.device)
    return torch.cat((first, prefilled.append(ids)[0].float()))

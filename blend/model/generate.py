"""From a prefilled cache to an answer, through `model.generate` with its logits processors and stopping criteria."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from blend.config import ANSWER_TOKENS
from blend.errors import ConfigError, UnsupportedModelError
from blend.ranges import check_number

if TYPE_CHECKING:
    from blend.model.decoder import Decoder
    from blend.sampling import Sampling

SUPPORTED = ">=5.14,<6"  # of transformers, as the distribution requires it
LEAST_TEMPERATURE = 1e-5  # below it, sampling takes the likeliest token anyway
OnText = Callable[[str], None]
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""From token ids `[1, n]` of prompt and answer and logits `[1, vocab]` to logits to choose from."""


class Continuable(Protocol):
    """A prefilled prompt, blended or not, as decoding and teacher forcing need it."""

    @property
    def logits(self) -> Tensor:
        """Next-token logits, `[1, vocab]`."""
        ...

    def append(self, token_ids: Tensor) -> Tensor:
        """Run further tokens `[1, n]`. Returns their next-token logits `[1, n, vocab]`."""
        ...


@dataclass(frozen=True)
class Generation:
    """An answer.

    Attributes:
        text: The decoded answer; empty if the decoder has no tokenizer.
        token_ids: The answer's token ids, without the prompt.
        seconds: Decoding time in seconds, from choosing the first token to the end.
    """

    text: str
    token_ids: tuple[int, ...]
    seconds: float

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first, or None for a single token."""
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
    """Decode an answer from a prefilled prompt with `model.generate`, without running the prompt again.

    >>> from blend import Blender, Decoder, PromptTemplate, generate, open_store
    >>> decoder = Decoder.load("my-model")
    >>> blender = Blender(decoder, open_store("memory:"))
    >>> layout = PromptTemplate(decoder.tokenizer).layout("How many?", [Passage("Harbour", "It has seven gates.")])
    >>> generation = generate(decoder, blender.prefill(layout, room=4), layout.token_ids, max_new_tokens=4)
    >>> len(generation.token_ids)
    4

    Args:
        decoder: The decoder that prefilled the prompt.
        prefilled: The prefilled prompt, such as a `Blend`.
        prompt_ids: The prompt's token ids, for logits processors and stopping criteria.
        max_new_tokens: Maximum length of the answer in tokens; it also ends where the decoder's context does.
        on_text: Called with each piece of text as soon as it is final.
        **options: Further options of `model.generate`. Decoding is greedy by default.

    Returns:
        The answer.

    Raises:
        ContextLengthError: The context leaves no room for an answer.
        ConfigError: The options ask for several sequences or an invalid length, or `on_text` is given without a tokenizer.
        UnsupportedModelError: This version of transformers has no `custom_generate`.
    """
    if on_text is not None and decoder.tokenizer is None:
        raise ConfigError("this decoder has no tokenizer to make text with: leave out on_text, and read token_ids")
    if any((options.get(name) or 1) != 1 for name in ("num_beams", "num_return_sequences")):
        raise ConfigError("one sequence a prompt: num_beams and num_return_sequences must be 1")
    check_number("max_new_tokens", max_new_tokens)
    max_new_tokens = decoder.answer_length(len(prompt_ids), max_new_tokens)
    _require_custom_generate()
    begin = time.perf_counter()
    ids = torch.tensor([list(prompt_ids)], device=decoder.device)
    out = decoder.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        custom_generate=_decoding_loop(decoder.tokenizer, prefilled, on_text),
        **{"do_sample": False, "temperature": None, "top_p": None, "top_k": None, **options},
    )
    answer = out[0, ids.shape[1] :].tolist()
    text = ""
    if decoder.tokenizer is not None:
        text = decoder.tokenizer.decode(answer, skip_special_tokens=True)
    return Generation(text.strip(), tuple(answer), time.perf_counter() - begin)


def _decoding_loop(tokenizer: Any, prefilled: Continuable, on_text: OnText | None) -> Callable[..., Tensor]:
    """A decoding loop for `generate(custom_generate=...)` that starts from known logits."""
    streamer = _streamer(tokenizer, on_text) if on_text else None

    def loop(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **_: Any,
    ) -> Tensor:
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


def logits_processors(decoder: Decoder, sampling: Sampling, prompt_ids: Tensor) -> LogitsProcessor:
    """The processors of an answer: those that `model.generate` makes of the model's `generation_config`, and the request's.

    The request's values replace the model's; their order is vLLM's. What else narrows sampling follows `top_p`, and the model's
    other settings stand next to the repetition penalty, in transformers' order.

    Args:
        decoder: The decoder that answers.
        sampling: The request's values.
        prompt_ids: Token ids of the prompt, `[1, n]`.

    Raises:
        UnsupportedModelError: This version of transformers makes its processors in another way.

    """
    from transformers.generation import logits_process as made

    model = decoder.model
    rows = prompt_ids.shape[1]
    if not hasattr(model, "_get_logits_processor"):
        raise _unknown_generate()
    config = copy.deepcopy(model.generation_config)
    config.update(max_length=rows + sampling.max_tokens, do_sample=sampling.temperature >= LEAST_TEMPERATURE)
    config.update(temperature=None, min_p=None, top_k=None, top_p=None)
    if sampling.repetition_penalty is not None:
        config.repetition_penalty = sampling.repetition_penalty
    stops = end_tokens(config)
    config._eos_token_tensor = torch.tensor(stops, device=prompt_ids.device) if stops else None
    processors = model._get_logits_processor(
        config,
        input_ids_seq_length=rows,
        encoder_input_ids=prompt_ids,
        logits_processor=_requested(sampling, rows),
        device=prompt_ids.device,
    )
    if sampling.logit_bias:
        biases = [[[token], float(bias)] for token, bias in sampling.logit_bias.items()]
        processors.insert(0, made.SequenceBiasLogitsProcessor(biases))
    return processors  # type: ignore[no-any-return]  # transformers is untyped here


def _requested(sampling: Sampling, prompt_rows: int) -> list[LogitsProcessor]:
    """The processors of a request that stand between those of its model."""
    from transformers.generation import logits_process as made

    requested = list[LogitsProcessor]()
    if sampling.presence_penalty or sampling.frequency_penalty:
        requested.append(OutputPenalties(prompt_rows, sampling.presence_penalty, sampling.frequency_penalty))
    if sampling.temperature < LEAST_TEMPERATURE:
        return requested  # the rest never changes which token is the likeliest
    requested.append(made.TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.min_p:
        requested.append(made.MinPLogitsWarper(sampling.min_p))
    if sampling.top_k > 0:
        requested.append(made.TopKLogitsWarper(sampling.top_k))
    return [*requested, made.TopPLogitsWarper(sampling.top_p)]


def end_tokens(generation_config: Any) -> tuple[int, ...]:
    """The tokens that end an answer."""
    stops = generation_config.eos_token_id
    return (stops,) if isinstance(stops, int) else tuple(stops or ())


@dataclass(frozen=True)
class OutputPenalties:
    """OpenAI's penalties, as a logits processor: `logit - count * frequency - (count > 0) * presence`.

    count: of each token in the answer. prompt_rows: tokens before the answer, which do not count.
    """

    prompt_rows: int
    presence: float
    frequency: float

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The penalized scores `[1, vocab]` behind prompt and answer `[1, n]`."""
        answer = input_ids[0, self.prompt_rows :]
        counts = torch.zeros_like(scores[0], dtype=torch.int64)
        counts.scatter_add_(0, answer, torch.ones_like(answer))  # unlike `bincount`, without reading from the device
        return scores - self.frequency * counts - self.presence * (counts > 0)


def _require_custom_generate() -> None:
    from transformers import GenerationMixin

    if "custom_generate" not in inspect.signature(GenerationMixin.generate).parameters:
        raise _unknown_generate()


def _unknown_generate() -> UnsupportedModelError:
    return UnsupportedModelError(
        f"transformers {version('transformers')} does not hand over decoding as kvblend needs it; "
        f"install a version that it is made for: pip install 'transformers{SUPPORTED}'"
    )


def _choose(scores: Tensor, sample: bool) -> Tensor:
    if sample:
        return torch.multinomial(scores.softmax(-1), 1)
    return scores.argmax(-1, keepdim=True)


def _streamer(tokenizer: Any, on_text: OnText) -> Any:
    """Streamer of transformers, which waits for whole words and code points, with `on_text` instead of print."""
    from transformers import TextStreamer

    class CallbackStreamer(TextStreamer):  # type: ignore[misc]  # transformers is untyped here
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                on_text(text)

    return CallbackStreamer(tokenizer, skip_special_tokens=True)


@torch.inference_mode()
def teacher_forced_logits(prefilled: Continuable, answer_ids: Sequence[int]) -> Tensor:
    """Logits that predict each token of a given answer, float32 `[answer, vocab]`.

    Appends the answer without its last token to the prefilled prompt.
    """
    first = prefilled.logits.float()
    if len(answer_ids) < 2:
        return first[: len(answer_ids)]
    ids = torch.tensor([list(answer_ids[:-1])], device=first.device)
    later = prefilled.append(ids)[0]
    return torch.cat((first, later.float()))

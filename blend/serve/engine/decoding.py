"""One answer to a prefilled prompt: its tokens, chosen from logits one by one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from blend.model.cache import Run
from blend.model.generate import LEAST_TEMPERATURE, end_tokens, logits_processors
from blend.model.passes import RowRequest
from blend.serve.events import Output, Token, TopToken
from blend.serve.prompt import Prompt

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache
    from blend.model.decoder import Decoder
    from blend.serve.events import EndReason, OnEvent

MOST_DRAFTED = 64  # tokens of a draft in a pass, which the other answers of the pass wait for


class HostCopy:
    """A small tensor's copy in host memory. Making it does not wait for the device; on a CPU it is the tensor itself.

    Args:
        tensor: integers, which no later work changes.

    """

    def __init__(self, tensor: Tensor) -> None:
        self._numbers = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._numbers = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._numbers.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(tensor.device))

    @property
    def ready(self) -> bool:
        """Whether reading it waits for nothing."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[int]:
        """The numbers, in one flat list. Waits until the device has computed them, and for nothing behind them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._numbers.flatten().tolist()


class Choice(NamedTuple):
    """A token that the device chooses. ids: `[1, 1]`, on the device. copy: of them. logits: `[vocab]`, chosen from."""

    ids: torch.Tensor
    copy: HostCopy
    logits: torch.Tensor


class Sampler:
    """Chooses the tokens of one answer to a prompt. index: of the answer.

    The model's `generation_config` applies as in `model.generate`, except for `temperature`, `top_p`, `top_k` and `min_p`. So a
    greedy answer equals that of `blend answer`.
    """

    def __init__(self, decoder: Decoder, prompt: Prompt, index: int = 0) -> None:
        sampling = prompt.sampling
        grammar = prompt.grammar
        stops = end_tokens(decoder.model.generation_config)
        self._stops = frozenset(() if sampling.ignore_eos else stops)
        self._sampling = sampling
        self._matcher = grammar.matcher() if grammar is not None else None
        self._generator = torch.Generator(device=decoder.device)
        if sampling.seed is not None:
            self._generator.manual_seed(sampling.seed + index)
        else:
            self._generator.seed()
        self._ids = torch.tensor([prompt.layout.token_ids], device=decoder.device)
        self._greedy = sampling.temperature < LEAST_TEMPERATURE
        self._process = logits_processors(decoder, sampling, self._ids)

    def ends(self, token: int) -> bool:
        """Whether the answer ends with this token, the latest one."""
        return token in self._stops or (self._matcher is not None and self._matcher.ended)

    @property
    def waits(self) -> bool:
        """Whether a choice must be read before the next one: by its grammar, or with log probabilities."""
        return self._matcher is not None or self._sampling.logprobs is not None

    def choose(self, logits: torch.Tensor) -> Choice:
        """Choose the next token from logits `[vocab]`, without reading it."""
        allowed = logits if self._matcher is None else self._matcher.masked(logits)
        scores = self._process(self._ids, allowed.float()[None])
        chosen = scores.argmax(-1, keepdim=True) if self._greedy else self._sampled(scores)
        self._ids = torch.cat((self._ids, chosen), 1)
        return Choice(chosen, HostCopy(chosen), logits)

    def read(self, choice: Choice) -> Token:
        """The chosen token. Waits for the device."""
        (token,) = choice.copy.read()
        now = time.monotonic()
        if self._matcher is not None:
            self._matcher.take(token)
        if self._sampling.logprobs is None:
            return Token(token, at=now)
        logprobs = choice.logits.float().log_softmax(-1)
        best = logprobs.topk(self._sampling.logprobs)
        top = tuple(map(TopToken, best.indices.tolist(), best.values.tolist()))
        return Token(token, float(logprobs[token]), top, now)

    def _sampled(self, scores: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(scores.softmax(-1), 1, generator=self._generator)


class Decoding:
    """One answer to a prefilled prompt, decoded token by token. It takes part in passes: see `scheduler.BatchItem`.

    Where the prompt allows, a token goes from the sampler to the next pass without the host, which reads it while that pass
    runs. An answer that has stopped has then run one row too many: it is dropped.

    Args:
        send: takes its tokens.
        end: called when it is complete.
        fail: called if it cannot go on.

    Attributes:
        index: its index among the answers to the prompt.
        cache: KV of prompt and answer.
        tokens: the answer so far, as the host knows it.
        ended: it, or the prompt with all answers, has ended.

    """

    def __init__(
        self,
        prompt: Prompt,
        decoder: Decoder,
        index: int,
        cache: BlendedCache,
        *,
        send: OnEvent,
        end: Callable[[Decoding, EndReason], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self.index = index
        self.cache = cache
        self.tokens = list[int]()
        self.ended = False
        self.fail = fail
        self._send = send
        self._end = end
        self._prompt = prompt
        self._device = decoder.device
        self._sampler = Sampler(decoder, prompt, index)
        self._draft = prompt.draft[: prompt.sampling.max_tokens]
        self._unread: Choice | None = None  # the token behind `tokens`
        # Recurrent layers keep no state to go back to, if the next row is one too many.
        self._waits = self._sampler.waits or bool(decoder.recurrent)

    def next_rows(self) -> RowRequest:
        """The row of its last token, and those of the draft behind it while the answer agrees with it.

        The draft's last token runs only if the answer goes on behind it: recurrent layers keep no state between the rows of a
        pass, and later prompts go on where the answer ends. After a token that was not chosen, they go back to the last state.
        """
        count = len(self.tokens)
        rows = self._prompt.layout.rows
        if self._unread is not None:
            place = rows + count
            self.cache.truncate(place)
            return RowRequest(self._unread.ids, Run.consecutive(place, place + 1, self._device), self.cache)
        place = rows + count - 1
        start = self.cache.resumable(place)
        self.cache.truncate(start)  # a pass that failed, or tokens that were not chosen, may have left rows behind
        drafted = self._draft[count : min(count + MOST_DRAFTED, len(self._draft) - 1)]
        ids = [*self.tokens[start - rows :], *drafted]
        run = Run.consecutive(start, start + len(ids), self._device)
        outputs = 1 + len(drafted)
        on_device = torch.tensor([ids]).to(self._device, non_blocking=True)
        return RowRequest(on_device, run, self.cache, outputs=outputs)

    def took(self, logits: torch.Tensor) -> None:
        """Choose the next tokens from logits `[rows, vocab]`: as many as agree with the draft, and one more."""
        if self.ended:  # another answer to the prompt failed in this pass
            return
        for row in logits:
            choice = self._sampler.choose(row)
            if self._unread is not None and not self._read(self._unread):
                return
            if self._may_read_late(choice):
                self._unread = choice
                return
            self._unread = None
            place = len(self.tokens)
            if not self._read(choice) or self._draft[place : place + 1] != (self.tokens[-1],):
                self._draft = ()
                return

    def _may_read_late(self, choice: Choice) -> bool:
        """Whether the next pass can run before this token is read; the client waits for the first, and the last ends."""
        count = len(self.tokens)
        between = 0 < count < self._prompt.sampling.max_tokens - 1
        return between and not (self._draft or self._waits or choice.copy.ready)

    def _read(self, choice: Choice) -> bool:
        """Take a chosen token; whether the answer goes on."""
        token = self._sampler.read(choice)
        self.tokens.append(token.id)
        self._send(Output((token,), answer=self.index))
        if self._sampler.ends(token.id) or self.index in self._prompt.stopped:
            self._end(self, "stop")
        elif len(self.tokens) == self._prompt.sampling.max_tokens:
            self._end(self, "length")
        return not self.ended

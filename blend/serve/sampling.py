"""Chooses the tokens of one answer from logits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from blend.model.generate import LEAST_TEMPERATURE, logits_processors
from blend.serve.types import Request, Token, TopToken

if TYPE_CHECKING:
    from blend.model.decoder import Decoder


class Sampler:
    """Chooses the tokens of one answer to a request. index: of the answer.

    The model's `generation_config` gives the tokens that end an answer and the default repetition penalty, as in
    `model.generate`, so a greedy answer equals that of `blend answer`.
    """

    def __init__(self, decoder: Decoder, request: Request, index: int = 0) -> None:
        sampling, prompt, grammar = request.sampling, request.layout.token_ids, request.grammar
        config: Any = decoder.model.generation_config
        stops = config.eos_token_id
        self._stops = frozenset(() if sampling.ignore_eos else [stops] if isinstance(stops, int) else stops or ())
        self._sampling = sampling
        self._matcher = grammar.matcher() if grammar is not None else None
        self._generator = torch.Generator(device=decoder.device)
        if sampling.seed is not None:
            self._generator.manual_seed(sampling.seed + index)
        else:
            self._generator.seed()
        self._ids = torch.tensor([prompt], device=decoder.device)
        self._greedy = sampling.temperature < LEAST_TEMPERATURE
        self._process = logits_processors(decoder, sampling, len(prompt))

    def ends(self, token: int) -> bool:
        """Whether the answer ends with this token, the latest one."""
        return token in self._stops or (self._matcher is not None and self._matcher.ended)

    def choose(self, logits: torch.Tensor) -> Token:
        """The next token from logits `[vocab]`."""
        allowed = logits if self._matcher is None else self._matcher.masked(logits)
        scores = self._process(self._ids, allowed.float()[None])
        chosen = scores.argmax(-1, keepdim=True) if self._greedy else self._sampled(scores)
        self._ids = torch.cat((self._ids, chosen), 1)
        token, now = int(chosen), time.monotonic()
        if self._matcher is not None:
            self._matcher.take(token)
        if self._sampling.logprobs is None:
            return Token(token, at=now)
        logprobs = logits.float().log_softmax(-1)
        best = logprobs.topk(self._sampling.logprobs)
        top = tuple(map(TopToken, best.indices.tolist(), best.values.tolist()))
        return Token(token, float(logprobs[token]), top, now)

    def _sampled(self, scores: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(scores.softmax(-1), 1, generator=self._generator)

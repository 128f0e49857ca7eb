"""From logits to the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from blend.serve.engine import Sampling, Token

if TYPE_CHECKING:
    from blend.model.decoder import Decoder

LEAST_TEMPERATURE = 1e-5  # below it the likeliest token is taken, as a draw would all the same


class Sampler:
    """Chooses the tokens of one answer; prompt: its token ids.

    The model's own `generation_config` decides which tokens end an answer, and its repetition penalty applies, as in
    `model.generate`, so that a greedy answer is the one that `blend answer` gives.
    """

    def __init__(self, decoder: Decoder, sampling: Sampling, prompt: tuple[int, ...]) -> None:
        config: Any = decoder.model.generation_config
        stops = config.eos_token_id
        self.stops = frozenset(() if sampling.ignore_eos else [stops] if isinstance(stops, int) else stops or ())
        self._sampling, self._device = sampling, decoder.device
        self._draw = torch.Generator(device=decoder.device)
        if sampling.seed is not None:
            self._draw.manual_seed(sampling.seed)
        else:
            self._draw.seed()
        self._penalty = float(config.repetition_penalty or 1.0)
        self._seen = torch.tensor(sorted(set(prompt)), device=decoder.device) if self._penalty != 1.0 else None

    def choose(self, logits: torch.Tensor) -> Token:
        """The next token from logits `[vocab]`."""
        scores = self._penalised(logits.float())
        greedy = self._sampling.temperature < LEAST_TEMPERATURE
        token = int(scores.argmax()) if greedy else self._drawn(scores)
        if self._seen is not None:
            self._seen = torch.cat((self._seen[self._seen != token], self._seen.new_tensor([token])))
        if self._sampling.logprobs is None:
            return Token(token)
        logprobs = logits.float().log_softmax(-1)
        best = logprobs.topk(self._sampling.logprobs)
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return Token(token, float(logprobs[token]), top)

    def _penalised(self, scores: torch.Tensor) -> torch.Tensor:
        """Tokens seen before made less likely (CTRL, Keskar et al. 2019)."""
        if self._seen is None:
            return scores
        seen = scores[self._seen]
        worse = torch.where(seen < 0, seen * self._penalty, seen / self._penalty)
        return scores.index_copy(0, self._seen, worse)

    def _drawn(self, scores: torch.Tensor) -> int:
        """Drawn from the nucleus (Holtzman et al. 2020): the likeliest tokens that reach `top_p` together, one at least."""
        below = scores - scores.max()  # the best stays 0: no temperature makes it infinite
        chances, order = (below / self._sampling.temperature).softmax(-1).sort(descending=True)
        beyond = chances.cumsum(-1) - chances >= self._sampling.top_p
        beyond[0] = False
        return int(order[torch.multinomial(chances.masked_fill(beyond, 0.0), 1, generator=self._draw)])

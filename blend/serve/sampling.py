"""Chooses the tokens of an answer from logits, and holds answers to a given form.

JSON schemas and calls of functions become masks over the next token, by llguidance. Each answer has its own matcher, so
requests with and without a form run in one batch.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from blend.model.generate import LEAST_TEMPERATURE, end_tokens, logits_processors
from blend.serve.thoughts import Thinking
from blend.serve.tool_calls import CallFormat
from blend.serve.types import FieldError, Request, Token, Tools, TopToken

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from blend.model.decoder import Decoder

# As `json.dumps` writes it: where blanks are free, a model may write them for ever.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FORMAT = "response_format"
_SCHEMA = "response_format.json_schema.schema"
_MOST_WORDS = 200  # characters of the library's message


class Sampler:
    """Chooses the tokens of one answer to a request. index: of the answer.

    The model's `generation_config` applies as in `model.generate`, except for `temperature`, `top_p`, `top_k` and `min_p`. So a
    greedy answer equals that of `blend answer`.
    """

    def __init__(self, decoder: Decoder, request: Request, index: int = 0) -> None:
        sampling, grammar = request.sampling, request.grammar
        stops = end_tokens(decoder.model.generation_config)
        self._stops = frozenset(() if sampling.ignore_eos else stops)
        self._sampling = sampling
        self._matcher = grammar.matcher() if grammar is not None else None
        self._generator = torch.Generator(device=decoder.device)
        if sampling.seed is not None:
            self._generator.manual_seed(sampling.seed + index)
        else:
            self._generator.seed()
        self._ids = torch.tensor([request.layout.token_ids], device=decoder.device)
        self._greedy = sampling.temperature < LEAST_TEMPERATURE
        self._process = logits_processors(decoder, sampling, self._ids)

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


class Matcher:
    """Follows one answer. ended: it is complete, and nothing may follow."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def ended(self) -> bool:
        """Whether the answer is complete."""
        return self._matcher.is_stopped()

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits `[vocab]` with minus infinity for tokens that may not follow."""
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        return logits.masked_fill(allowed[: len(logits)].to(logits.device) == 0, -torch.inf)

    def take(self, token: int) -> None:
        """The answer goes on with this token. Raises `FieldError` if the library gives up on the form."""
        if not self._matcher.consume_token(token):
            raise FieldError(
                f"{_FORMAT}: the schema is too large to follow: {_words(self._matcher.get_error())}", _FORMAT
            )


class Grammar:
    """The form of an answer."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def matcher(self) -> Matcher:
        """For one answer."""
        return Matcher(self._matcher.deep_copy())


class GrammarCompiler:
    """Makes grammars for a decoder's tokenizer. Threads may share it. form: how the model writes calls."""

    def __init__(self, decoder: Decoder, form: CallFormat) -> None:
        self._decoder, self._form = decoder, form
        self._lock = threading.Lock()

    def compile(
        self, schema: Mapping[str, Any] | None, tools: Tools | None, thinking: Thinking | None = None
    ) -> Grammar | None:
        """The form of an answer: JSON of a schema, calls, or either; None if anything may be answered.

        Calls have a form if one must be made, or if a function is strict. thinking: thoughts may stand before the form. Raises
        `FieldError` for what the library refuses.
        """
        if schema is None and not (tools and (tools.required or any(one.strict for one in tools.functions))):
            return None
        rules, starts = list[str](), list[str]()
        if schema is not None and not (tools and tools.required):
            rules.append(f"answer: %json {self._checked(schema, _SCHEMA, lenient=False)}")
            starts.append("answer")
        if tools is not None:
            rules += self._calls(tools)
            starts.append("calls")
            if schema is None and not tools.required:
                rules += self._text()
                starts = ["text_or_calls"]
        from llguidance import LLMatcher

        rules.append(f"form: {' | '.join(starts)}")
        made = LLMatcher(self._tokenizer, "\n".join((*self._start(thinking), *rules)), log_level=0)
        made.compute_logit_bias()  # the library notices here that a form is too large
        if made.is_error():
            place = "tools" if schema is None else _SCHEMA
            raise FieldError(f"{place}: {_words(made.get_error())}", place)
        return Grammar(made)

    def _start(self, thinking: Thinking | None) -> list[str]:
        """Rules for the whole answer: thoughts, if there may be some, and `form`."""
        if thinking is None:
            return ["start: form"]
        begin, end = map(self._marker, thinking.markers)
        # Some models repeat the marker at the prompt's end.
        start = f"({begin})? thoughts form" if thinking.opened else f"form | {begin} thoughts form"
        rules = [f"start: {start}", r"THOUGHTS: /(.|\n)*/", r"BLANKS: /\n{0,2}/"]
        if not end.startswith('"'):
            return [*rules, f"thoughts: THOUGHTS {end} BLANKS"]
        return [*rules, "thoughts: until BLANKS", f"until[lazy]: THOUGHTS {end}"]

    def _calls(self, tools: Tools) -> list[str]:
        """Rules for `calls`: everything behind `begin`, which `_text` or `calls` itself writes."""
        functions = [one for one in tools.functions if not tools.required or one.name in tools.required]
        rules = [f"one: {' | '.join(f'one_{number}' for number in range(len(functions)))}"]
        for number, one in enumerate(functions):
            place = f"tools[{[*tools.functions].index(one)}].function.parameters"
            name = _literal(f'{{"name": {json.dumps(one.name)}, "{self._form.arguments}": ')
            parameters = self._checked({"type": "object", **one.parameters}, place, lenient=not one.strict)
            rules += [f'one_{number}: {name} arguments_{number} "}}"', f"arguments_{number}: %json {parameters}"]
        return [*rules, *self._around(parallel=tools.parallel)]

    def _around(self, *, parallel: bool) -> list[str]:
        """Rules for `calls` and `rest`, which is `calls` without the first `begin`."""
        form, begin = self._form, self._marker(self._form.begin)
        if form.bare:
            return ["calls: rest", "rest: one"]
        if form.array:
            more = '(", " one)*' if parallel else ""
            return [f"calls: {begin} rest", f'rest: " "? "[" one {more} "]"']
        call = f'"\\n" one "\\n" {self._marker(form.end)}'
        more = f'("\\n" {begin} {call})*' if parallel else ""
        return [f"calls: {begin} rest", f"rest: {call} {more}"]

    def _text(self) -> list[str]:
        """Rules for text that calls may follow; the text of a bare form does not begin like a call."""
        if self._form.bare:
            return ["text_or_calls: calls | OTHER", r"OTHER: /([^{\[\s](.|\n)*)?/"]
        begin = self._marker(self._form.begin)
        if not begin.startswith('"'):
            return [f"text_or_calls: TEXT | TEXT {begin} rest", r"TEXT: /(.|\n)*/"]
        return ["text_or_calls: TEXT | head rest", f"head[lazy]: TEXT {begin}", r"TEXT: /(.|\n)*/"]

    def _marker(self, text: str) -> str:
        """A text around calls in a rule: the control token of this name, or the plain text."""
        added = {str(word): int(token) for token, word in self._decoder.tokenizer.added_tokens_decoder.items()}
        token = added.get(text)
        return f"<[{token}]>" if token is not None and self._tokenizer.is_special_token(token) else _literal(text)

    def _checked(self, schema: Mapping[str, Any], place: str, *, lenient: bool) -> str:
        """The schema for the library. lenient: ignore keywords that it does not know."""
        from llguidance import LLMatcher

        written = json.dumps({**schema, "x-guidance": {**_SPACING, "lenient": lenient}})
        failed, messages = LLMatcher.validate_grammar_with_warnings(
            LLMatcher.grammar_from_json_schema(written), self._tokenizer
        )
        if failed:
            raise FieldError(f"{place}: {_words(messages[0])}", place)
        return written

    @property
    def _tokenizer(self) -> LLTokenizer:
        with self._lock:
            return self._made

    @cached_property
    def _made(self) -> LLTokenizer:
        """The library's view of the tokenizer; making it takes a second or more."""
        from llguidance.hf import from_tokenizer

        tokenizer, stops = self._decoder.tokenizer, self._decoder.model.generation_config.eos_token_id
        try:
            # One more than the vocabulary: the library adds an end token where it recognizes none.
            return from_tokenizer(tokenizer, n_vocab=self._decoder.vocabulary + 1, eos_token=stops)
        except ValueError as error:
            raise FieldError(f"this model's tokenizer cannot follow a form: {_words(str(error))}", _FORMAT) from None


def _literal(text: str) -> str:
    return json.dumps(text)


def _words(message: str) -> str:
    return " ".join(message.split())[:_MOST_WORDS]

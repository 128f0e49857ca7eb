"""Holds answers to a given form: JSON of a schema, or calls of functions.

Forms become masks over the next token, by llguidance. Each answer has its own matcher, so requests with and without a form run
in one batch.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from cachetools import LRUCache, cachedmethod

from blend.serve.forms.schemas import TOO_LARGE, Schema, in_words, parser_limits, require_compilable, written_schema
from blend.serve.forms.thoughts import Thinking
from blend.serve.forms.tool_calls import CallFormat
from blend.serve.request import FieldError, Tools

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from blend.model.decoder import Decoder

# As `json.dumps` writes it: where blanks are free, a model may write them for ever.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FORMAT = "response_format"
_SCHEMA = "response_format.json_schema.schema"
_CACHE_BYTES = 1 << 28  # of compiled grammars
_GRAMMAR_BYTES = 1 << 20  # that one counts at least


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
            raise FieldError(f"{_FORMAT}: {TOO_LARGE}: {in_words(self._matcher.get_error())}", _FORMAT)


class Grammar(NamedTuple):
    """The form of an answer. nbytes: its memory."""

    prepared: LLMatcher
    nbytes: int

    def matcher(self) -> Matcher:
        """For one answer."""
        return Matcher(self.prepared.deep_copy())


class GrammarCompiler:
    """Makes grammars for a decoder's tokenizer. Threads may share it. form: how the model writes calls."""

    def __init__(self, decoder: Decoder, form: CallFormat) -> None:
        self._decoder = decoder
        self._form = form
        self._lock = threading.Lock()
        self._grammars = LRUCache[str, Grammar](_CACHE_BYTES, getsizeof=lambda grammar: grammar.nbytes)

    def compile(self, schema: Mapping[str, Any] | None, tools: Tools | None, thinking: Thinking | None) -> Grammar:
        """The form of an answer: JSON of a schema, calls, or either.

        Calls have a form if one must be made, or if a function is strict. thinking: thoughts may stand before the form.
        Raises `FieldError` for what the library refuses.
        """
        schemas = list[Schema]()
        rules = list[str]()
        starts = list[str]()
        if schema is not None and not (tools and tools.required):
            schemas.append(written_schema(_SCHEMA, schema, {**_SPACING, "lenient": False}))
            rules.append(f"answer: %json {schemas[0].text}")
            starts.append("answer")
        if tools is not None:
            parameters = self._parameters(tools)
            schemas += parameters.values()
            rules += self._calls(parameters, parallel=tools.parallel)
            starts.append("calls")
            if schema is None and not tools.required:
                rules += self._text()
                starts = ["text_or_calls"]
        rules.append(f"form: {' | '.join(starts)}")
        text = "\n".join((*self._start(thinking), *rules))
        return self._compile(text, schemas, "tools" if schema is None else _SCHEMA)

    @cachedmethod(attrgetter("_grammars"), key=lambda self, text, *_: text, lock=attrgetter("_lock"))
    def _compile(self, text: str, schemas: list[Schema], field: str) -> Grammar:
        from llguidance import LLMatcher

        nbytes = require_compilable(schemas)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=parser_limits())
        matcher.compute_logit_bias()  # the library notices here that a form is too large
        if matcher.is_error():
            raise FieldError(f"{field}: {in_words(matcher.get_error())}", field)
        return Grammar(matcher, max(nbytes, _GRAMMAR_BYTES))

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

    def _parameters(self, tools: Tools) -> dict[str, Schema]:
        """The parameters' schemas of functions that may be called, by the functions' names."""
        schemas = dict[str, Schema]()
        for number, function in enumerate(tools.functions):
            if not tools.required or function.name in tools.required:
                field = f"tools[{number}].function.parameters"
                # Not strict: keywords that the library does not know are ignored.
                options = {**_SPACING, "lenient": not function.strict}
                schemas[function.name] = written_schema(field, {"type": "object", **function.parameters}, options)
        return schemas

    def _calls(self, parameters: Mapping[str, Schema], *, parallel: bool) -> list[str]:
        """Rules for `calls`: everything behind `begin`, which `_text` or `calls` itself writes."""
        rules = [f"one: {' | '.join(f'one_{number}' for number in range(len(parameters)))}"]
        for number, (name, schema) in enumerate(parameters.items()):
            begin = _literal(f'{{"name": {json.dumps(name)}, "{self._form.arguments}": ')
            rules += [f'one_{number}: {begin} arguments_{number} "}}"', f"arguments_{number}: %json {schema.text}"]
        return [*rules, *self._around(parallel=parallel)]

    def _around(self, *, parallel: bool) -> list[str]:
        """Rules for `calls` and `rest`, which is `calls` without the first `begin`."""
        form = self._form
        begin = self._marker(self._form.begin)
        if form.bare:
            return ["calls: rest", "rest: one"]
        if form.array:
            further = '(", " one)*' if parallel else ""
            return [f"calls: {begin} rest", f'rest: " "? "[" one {further} "]"']
        call = f'"\\n" one "\\n" {self._marker(form.end)}'
        further = f'("\\n" {begin} {call})*' if parallel else ""
        return [f"calls: {begin} rest", f"rest: {call} {further}"]

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

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The library's view of the tokenizer; making it takes a second or more."""
        from llguidance.hf import from_tokenizer

        tokenizer = self._decoder.tokenizer
        stops = self._decoder.model.generation_config.eos_token_id
        try:
            # One more than the vocabulary: the library adds an end token where it recognizes none.
            return from_tokenizer(tokenizer, n_vocab=self._decoder.vocabulary + 1, eos_token=stops)
        except ValueError as error:
            raise FieldError(f"this model's tokenizer cannot follow a form: {in_words(str(error))}", _FORMAT) from None


def _literal(text: str) -> str:
    return json.dumps(text)

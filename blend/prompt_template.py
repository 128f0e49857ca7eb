"""Build prompts: the model's chat template, split into an exact prefix and a suffix, with the chunks between them.

Segments are tokenised one by one and joined as ids, so a chunk has the same ids in every prompt.

Text stays text: no document, title or question yields a control token. A tokenizer turns the characters `<|im_end|>` into that
control token wherever they stand, so a document could close the user's turn and speak as the system. `TextTokenizer` cuts such
text and tokenises the pieces apart, then checks the ids and cuts further. That works for every tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NamedTuple, Protocol

from blend.config import PromptConfig
from blend.errors import PromptError
from blend.layout import Place, PromptLayout, TokenIds, token_ids_of

_BLANKS = " \t\r\n\N{LOWER ONE EIGHTH BLOCK}"  # the last is how sentencepiece writes a space
_SUBSTITUTE = "\N{REPLACEMENT CHARACTER}"
_NEVER = re.compile(r"(?!)")  # matches nothing


class TextTokenizer:
    """Tokenises what a model's prompt is made of.

    tokenizer: a HuggingFace tokenizer. control: ids that text never yields: of the special tokens, and of all that were added
    to the vocabulary, but for runs of blanks and single characters, which stand for themselves.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._contents = dict[int, str]()
        for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
            word = str(token)
            if len(word) > 1 and word.strip(_BLANKS):
                self._contents[int(token_id)] = word
        special_ids = getattr(tokenizer, "all_special_ids", ())
        special_words = getattr(tokenizer, "all_special_tokens", ())
        self._contents.update(zip(special_ids, special_words, strict=True))
        self.control = frozenset(self._contents)
        self._never = self.control - self._unknown()

    def _unknown(self) -> frozenset[int]:
        """The unknown token's id, which any text may yield, unless it also has a control function."""
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        names = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id")
        control = {getattr(self._tokenizer, name, None) for name in names}
        return frozenset() if unknown is None or unknown in control else frozenset({unknown})

    def template(self, text: str) -> list[int]:
        """Ids of the chat template's own text, control tokens included."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def text(self, text: str) -> list[int]:
        """Ids of untrusted text, without control tokens; the tokenizer's own ids if they have none."""
        ids = self.template(text)
        if self.control.isdisjoint(ids):
            return ids
        return [token for piece in self.pieces(text) for token in self.template(piece)]

    def pieces(self, text: str) -> list[str]:
        """Untrusted text, cut so that no piece yields a control token."""
        if self.control.isdisjoint(self.template(text)):
            return [text]
        return [part for piece in self._cut(text) for part in self._checked(piece)]

    def fragments(self, text: str) -> list[str]:
        """Its pieces, cut further so that no part of one becomes a control token together with other text."""
        return [part for piece in self.pieces(text) for part in self._ends.split(piece) if part]

    def join(self, pieces: Sequence[str]) -> list[int]:
        """Ids of a text in pieces.

        In one piece, as the model was trained on it, where that has the control tokens of the pieces; else piece by piece.
        """
        whole = self.template("".join(pieces))
        if len(pieces) < 2:
            return whole
        apart = [self.template(piece) for piece in pieces]
        if self.only_control([whole]) == self.only_control(apart):
            return whole
        return list(chain.from_iterable(apart))

    def only_control(self, pieces: Iterable[Sequence[int]]) -> list[int]:
        """The control tokens among the ids of a text in pieces."""
        return [token for ids in pieces for token in ids if token in self.control]

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        """Finds spelled-out control tokens, overlaps included, the longest first."""
        words = "|".join(map(re.escape, self._words))
        return re.compile(f"(?=({words}))") if words else _NEVER

    @cached_property
    def _ends(self) -> re.Pattern[str]:
        """Finds the places behind characters that begin a control token, and in front of those that end one."""
        if not self._words:
            return _NEVER
        first = re.escape("".join({word[0] for word in self._words}))
        last = re.escape("".join({word[-1] for word in self._words}))
        return re.compile(f"(?<=[{first}])|(?=[{last}])")

    @cached_property
    def _words(self) -> list[str]:
        """The spellings of control tokens, the longest first."""
        return sorted(filter(None, self._contents.values()), key=len, reverse=True)

    def _cut(self, text: str) -> Iterator[str]:
        """The text cut after the first character of every control token that is spelled out in it."""
        cuts = (match.start() + 1 for match in self._spelled.finditer(text))
        for start, stop in pairwise((0, *cuts, len(text))):
            if stop > start:
                yield text[start:stop]

    def _checked(self, text: str) -> Iterator[str]:
        """A piece; cut in halves where it yields a control token without spelling it out, as normalisers make of it."""
        if self._never.isdisjoint(self.template(text)):
            yield text
        elif len(text) > 1:
            middle = len(text) // 2
            yield from self._checked(text[:middle])
            yield from self._checked(text[middle:])
        elif self._never.isdisjoint(self.template(_SUBSTITUTE)):
            yield _SUBSTITUTE


# Private-use characters stand for what users wrote while the template is applied: no template contains or changes them.
_SYSTEM, _INSTRUCTION, _CHUNKS = "\ue000", "\ue001", "\ue002"
_PERCENT = "\ue003"
_MARKS = re.compile(f"([{_SYSTEM}{_INSTRUCTION}{_CHUNKS}])")
_ANY_DAY = datetime(2024, 7, 26)  # the day that Llama 3's template names where there is no clock
_ANOTHER_DAY = datetime(2031, 12, 7, 13, 47, 58)  # differs in every part
_DIRECTIVES = "aAbBcCdDeFgGhHIjklmMnpPrRsStTuUVwWxXyYzZf"  # letters behind % in formats of dates


class TextChunk(Protocol):
    """A chunk of text, as prompts use it."""

    @property
    def title(self) -> str:
        """Heading under which the text stands; may be empty."""
        ...

    @property
    def text(self) -> str:
        """The chunk's own text."""
        ...


def apply_chat_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
    """A conversation in the model's chat template, ready for the answer; a transcript if it has no template.

    The command line and the server both use it, so the same question has the same token ids. arguments: for the template.
    Raises whatever the template raises.
    """
    if not getattr(tokenizer, "chat_template", None):
        return (tokenizer.bos_token or "") + _transcript(messages)
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments))


def _transcript(messages: Sequence[Mapping[str, Any]]) -> str:
    """The conversation for a base model: paragraphs, each answer on its own line, and the next answer begun."""
    text = ""
    for message in messages:
        before = "\nAnswer: " if message["role"] == "assistant" else "\n\n"
        text += before + message["content"].strip()
    return text.removeprefix("\n\n") + "\nAnswer:"


def render_chunk(chunk: TextChunk) -> str:
    """A chunk as it stands in the prompt: its title on a line, its text, a blank line."""
    title = f"{chunk.title}\n" if chunk.title else ""
    return f"{title}{chunk.text.strip()}\n\n"


class _AroundChunks(NamedTuple):
    """Pieces of text before the chunks, and the text after the question."""

    before: list[str]
    after: str


class PromptTemplate:
    """Turns a question and chunks into a `PromptLayout`.

    >>> from blend import Decoder, PromptTemplate
    >>> template = PromptTemplate(Decoder.load("my-model").tokenizer)
    >>> layout = template.layout("How many gates are there?", [Passage("Harbour", "The harbour has seven gates.")])
    >>> len(layout.chunks), layout.rows == len(layout.token_ids)
    (1, True)

    Args:
        tokenizer: a HuggingFace tokenizer; without a chat template the prompt is a transcript.
        config: the text around the chunks.

    Attributes:
        prefix: the prefix behind which chunk caches are kept. If the chat template writes today's date (Llama 3, GPT-OSS), this
            prefix has a fixed date instead, so that the store stays useful.

    Raises:
        PromptError: there is no tokenizer, or the template has no usable prefix.

    """

    def __init__(self, tokenizer: Any, config: PromptConfig | None = None) -> None:
        if tokenizer is None:
            raise PromptError("this decoder has no tokenizer: put the prompt together as a PromptLayout of token ids")
        self.config = config or PromptConfig()
        self._tokenizer = tokenizer
        self._text = TextTokenizer(tokenizer)
        template = getattr(tokenizer, "chat_template", None)
        if isinstance(template, dict):
            template = template.get("default")
        self._undated = self._around_chunks(template and _on_day(_ANY_DAY, template))
        self._is_dated = self._undated != self._around_chunks(template and _on_day(_ANOTHER_DAY, template))
        self.prefix = tuple(self._text.join(self._undated.before))
        if not self.prefix:
            raise PromptError("the prompt has no prefix: give the prompt an instruction or a system message")

    def layout(self, question: str, chunks: Sequence[TextChunk]) -> PromptLayout:
        """Token ids of the prompt.

        Raises:
            PromptError: the question is empty.

        """
        return self._around(question, tuple([Place(self.chunk_ids(chunk)) for chunk in chunks]))

    def layout_of_ids(self, question: str, chunks: Sequence[TokenIds]) -> PromptLayout:
        """`layout` for chunks that are token ids already, in any form that `PromptLayout.of_chunks` takes."""
        places = [Place(token_ids_of(chunk, f"chunk {number}")) for number, chunk in enumerate(chunks)]
        return self._around(question, tuple(places))

    def _around(self, question: str, places: tuple[Place, ...]) -> PromptLayout:
        """The prompt with these places."""
        if not question.strip():
            raise PromptError("the question is empty")
        text = self.config.question.replace("{question}", question.strip())
        around = self._around_chunks() if self._is_dated else self._undated
        suffix = tuple(self._text.join([*self._text.pieces(text), around.after]))
        if not self._is_dated:
            return PromptLayout(self.prefix, places, suffix)
        today = tuple(self._text.join(around.before))
        return PromptLayout(today, places, suffix, self.prefix)

    def chunk_ids(self, chunk: TextChunk) -> tuple[int, ...]:
        """Token ids of a chunk, the same in every prompt."""
        return tuple(self.encode(render_chunk(chunk)))

    def count(self, text: str) -> int:
        """Number of tokens of a text."""
        return len(self.encode(text))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, none of them a control token (`blend.prompt_template`)."""
        return self._text.text(text)

    def _around_chunks(self, template: str | None = None) -> _AroundChunks:
        """What stands around the chunks. template: instead of the tokenizer's own."""
        chosen = {} if template is None else {"chat_template": template}
        user = f"{_INSTRUCTION}{_CHUNKS}"
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": user}]
        text = ""
        with suppress(Exception):  # whatever the template's author raises
            text = self._apply(messages, chosen)
        if _SYSTEM not in text:  # some know no system role, or drop what it says: it then opens the user's turn
            text = self._apply([{"role": "user", "content": f"{_SYSTEM}\n\n{user}"}], chosen)
        before, mark, after = text.partition(_CHUNKS)
        if not mark:
            raise PromptError(
                "the model's chat template drops the user's message; pass a tokenizer with a usable template"
            )
        written = {_SYSTEM: self.config.system, _INSTRUCTION: self.config.instruction}
        pieces: list[str] = []
        for part in _MARKS.split(before):
            pieces += self._text.pieces(written[part]) if part in written else [part]
        return _AroundChunks(pieces, after)

    def _apply(self, messages: list[dict[str, str]], template: Mapping[str, str]) -> str:
        # Reasoning models answer directly: a chain of thought in front would be measured as the answer.
        return apply_chat_template(self._tokenizer, messages, enable_thinking=False, **template)


def _on_day(day: datetime, template: str) -> str:
    """A chat template that writes this day instead of today, whatever way its source asks for it.

    A macro takes the place of transformers' `strftime_now`. It replaces the directives of a format one by one, since templates
    have no clock of their own.
    """
    directives = [f"%{flag}{letter}" for letter in _DIRECTIVES for flag in ("", "-")]
    written = [("%%", _PERCENT), *((directive, day.strftime(directive)) for directive in directives), (_PERCENT, "%")]
    loop = "{% set day = namespace(text=format) %}{% for directive, words in " + repr(written) + " %}"
    replaced = "{% set day.text = day.text.replace(directive, words) %}{% endfor %}{{ day.text }}"
    # The empty expression keeps a line break in front of the template.
    return f"{{% macro strftime_now(format) %}}{loop}{replaced}{{% endmacro %}}{{{{ '' }}}}{template}"

"""From messages to token ids and back: the model's chat template around passages, and the detokenizer of answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from itertools import chain, groupby, islice, takewhile
from typing import Any, NamedTuple

from blend.errors import PromptError
from blend.prompt import TextTokenizer, apply_chat_template
from blend.serve.types import Function, Message, Role, Token, ToolCall
from blend.types import Place, PlaceOrigin, PromptLayout

_MOST_MESSAGES = 4096
_PRIVATE_USE = range(0xF0000, 0x10FFFE)
DIRECT: Mapping[str, Any] = {"enable_thinking": False}
"""Template arguments with which reasoning models answer directly."""
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # how a tokenizer decodes bytes that are not a character yet
_LONGEST_WAIT = 8  # tokens: no character has more than four bytes
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how sentencepiece writes a byte that has no piece
# GPT-2's byte alphabet: printable bytes stand for themselves, the others for letters from U+0100 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(0x100) if byte not in _PRINTABLE)
_ALPHABET = {**{chr(byte): byte for byte in _PRINTABLE}, **{chr(0x100 + n): byte for n, byte in enumerate(_OTHERS)}}
_NEWLINE = "\u010a"  # in that alphabet


Change = Callable[[str], str]
Written = Sequence[str | Place]
"""The content of a message: text and passages in order."""


class Turn(NamedTuple):
    """One message as it stands in the prompt; see `Message`."""

    role: Role
    content: Written
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    thoughts: str = ""


def turn_of(message: Message) -> Turn:
    """A message without passages."""
    content = (message.content,)
    return Turn(message.role, content, message.tool_calls, message.tool_call_id, message.name, message.thoughts)


def template_message(turn: Turn) -> dict[str, Any]:
    """A message as chat templates take it, without passages.

    The arguments of calls are objects, and empty fields are left out.
    """
    calls = [
        {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": json.loads(one.arguments)}}
        for one in turn.tool_calls
    ]
    more = {
        "tool_calls": calls,
        "tool_call_id": turn.tool_call_id,
        "name": turn.name,
        "reasoning_content": turn.thoughts,
    }
    content = "".join(part for part in turn.content if isinstance(part, str))
    return {"role": turn.role, "content": content, **{name: value for name, value in more.items() if value}}


class _TemplateInput:
    """A conversation as a template takes it, in which private-use characters mark passages, and where texts are cut.

    The characters stand nowhere in the conversation, and a template takes them for letters.
    """

    def __init__(self, turns: Sequence[Turn], arguments: Mapping[str, Any]) -> None:
        self._contents = [turn.content for turn in turns]
        self._messages, self._arguments = [template_message(turn) for turn in turns], arguments
        self.passages = [part for content in self._contents for part in content if isinstance(part, Place)]
        used = frozenset(json.dumps([self._messages, arguments], ensure_ascii=False, default=str))
        unused = (character for character in map(chr, _PRIVATE_USE) if character not in used)
        self.cut, *self._marks = islice(unused, 1 + len(self.passages))

    def changed(self, content: Change, other: Change) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Messages and arguments for the template, with the texts of contents and all other texts changed."""
        marks = iter(self._marks)
        messages = []
        for message, parts in zip(self._messages, self._contents, strict=True):
            written = (content(part) if isinstance(part, str) else next(marks) for part in parts)
            messages.append({**_changed({**message, "content": ""}, other), "content": "".join(written)})
        return messages, _changed(self._arguments, other)

    def runs(self, text: str) -> list[list[str]]:
        """The pieces of a rendered text before, between and behind its passages. Raises `PromptError` if one is not there."""
        runs = list[list[str]]()
        for mark in self._marks:
            run, there, text = text.partition(mark)
            if not there:
                raise PromptError("the model's chat template leaves out the message with the passages")
            runs.append(run.split(self.cut))
        return [*runs, text.split(self.cut)]


def _changed(value: Any, change: Change) -> Any:
    """A value of JSON with all its texts changed."""
    if isinstance(value, Mapping):
        return {_changed(name, change): _changed(one, change) for name, one in value.items()}
    if isinstance(value, list):
        return [_changed(one, change) for one in value]
    return change(value) if isinstance(value, str) else value


class ChatTemplate:
    """Tokenizes conversations. canonical_prefix: the prefix behind which the caches of passages were computed.

    Raises `PromptError` if `tokenizer` is None.
    """

    def __init__(self, tokenizer: Any, canonical_prefix: tuple[int, ...]) -> None:
        if tokenizer is None:
            raise PromptError("this decoder has no tokenizer, so it cannot be asked in words")
        self._tokenizer, self._text, self._canonical_prefix = tokenizer, TextTokenizer(tokenizer), canonical_prefix

    def layout(self, turns: Sequence[Turn], arguments: Mapping[str, Any] = DIRECT) -> PromptLayout:
        """The prompt that the template makes of a conversation, cut at its passages.

        Its control tokens are the template's own. Where the client's texts add some, they are cut there; if the template then
        decides otherwise, it gets them cut.

        Args:
            turns: The conversation.
            arguments: Arguments of the template.

        Raises:
            PromptError: The template refuses the conversation, or leaves out passages.

        """
        template_input = _TemplateInput(turns, arguments)
        cut, runs = template_input.cut, template_input.runs
        in_pieces = cache(lambda text: cut.join(self._text.pieces(text)))
        text = self._apply(*template_input.changed(str, str))
        outline = self._apply(*template_input.changed(lambda text: cut if text else "", in_pieces))
        ids = [self._text.join(run) for run in runs(text)]
        control = self._text.only_control(ids)
        # Around contents of one character the template writes its own control tokens alone.
        if control != self._own_control(runs(outline)):
            safe = self._apply(*template_input.changed(lambda text: cut.join(self._text.fragments(text)), in_pieces))
            if safe.replace(cut, "") == text or control != self._own_control(runs(safe)):
                ids = [self._text.join(run) for run in runs(safe)]
        return self._laid(ids, template_input.passages)

    def _own_control(self, runs: Sequence[Sequence[str]]) -> list[int]:
        """The control tokens of texts in pieces."""
        return self._text.only_control(self._text.template(piece) for piece in chain.from_iterable(runs))

    def continued(self, content: Sequence[str]) -> PromptLayout:
        """The prompt of a plain text to be continued; it begins as the tokenizer begins every text."""
        return self.plain((*self._opening, *self._text.text("".join(content))))

    @cached_property
    def _opening(self) -> tuple[int, ...]:
        """Ids that the tokenizer puts in front of every text.

        No attribute names them: Llama 3 adds its first token in a post-processor.
        """
        encoded = self._tokenizer("a", return_special_tokens_mask=True)
        own = list(takewhile(bool, encoded["special_tokens_mask"]))
        return tuple(encoded["input_ids"][: len(own)])

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template writes tools into the prompt."""
        asked, tool = [{"role": "user", "content": "Hello."}], Function("f", "", {"type": "object", "properties": {}})
        return self._apply(asked, DIRECT) != self._apply(asked, {**DIRECT, "tools": [tool.described]})

    def _apply(self, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        if len(messages) > _MOST_MESSAGES:
            raise PromptError(f"the conversation has {len(messages)} messages; shorten it to {_MOST_MESSAGES}")
        try:
            return apply_chat_template(self._tokenizer, messages, **arguments)
        except Exception as error:  # whatever the template's author raises
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise PromptError(f"the model's chat template refuses these messages: {why}") from None

    def _laid(self, texts: Sequence[Sequence[int]], passages: Sequence[Place]) -> PromptLayout:
        """The layout: prefix before the first passage, suffix behind the last one."""
        if not passages:
            return self.plain(tuple(texts[0]))
        if not texts[0] or not texts[-1]:
            raise PromptError("the prompt needs text in front of its passages and behind them")
        places = list[Place]()
        for passage, behind in zip(passages, (*texts[1:-1], ()), strict=True):
            places.append(passage)
            if behind:
                places.append(Place(tuple(behind), PlaceOrigin.TEXT))
        return PromptLayout(tuple(texts[0]), tuple(places), tuple(texts[-1]), self._canonical_prefix)

    def plain(self, ids: tuple[int, ...]) -> PromptLayout:
        """The prompt of these tokens, without passages. Raises `PromptError` for fewer than two."""
        if len(ids) < 2:
            raise PromptError("the prompt has less than two tokens; write more of it")
        return PromptLayout(ids[:-1], (), ids[-1:], self._canonical_prefix)


def question_turns(messages: Sequence[Message], passages: Sequence[Place], instructions: str) -> list[Turn]:
    """The conversation with `instructions` and passages before the user's last message.

    Results of tools may follow that message; the passages stay where they were when the answer called the tools.
    """
    opening = f"{instructions.strip()}\n\n" if instructions.strip() else ""
    turns = list(map(turn_of, messages))
    asked = max((number for number, one in enumerate(turns) if one.role == "user"), default=None)
    if asked is None:
        raise PromptError("documents need a message of the user's to stand before")
    turns[asked] = turns[asked]._replace(content=(opening, *passages, *turns[asked].content))
    return turns


class TokenBytes:
    """The bytes that each token of a HuggingFace tokenizer adds to a text; they may be part of a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def raw(self, token: int, *, first: bool = False) -> bytes:
        """The bytes of a token in a text that is decoded without control tokens, which add nothing.

        first: the text begins with it; some tokenizers drop a space there.
        """
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None or token in self._added:  # None: an id of the model that its tokenizer lacks
            return self._decoded([token])
        if self._is_of_bytes and _ALPHABET.keys() >= set(piece):
            return bytes(_ALPHABET[letter] for letter in piece)
        if (byte := _BYTE.fullmatch(piece)) and self._decoded([token]) != piece.encode():
            return bytes.fromhex(byte[1])
        before = [] if first else self._before
        return self._decoded([*before, token])[len(self._decoded(before)) :]

    @cached_property
    def _added(self) -> frozenset[int]:
        """Added tokens: the vocabulary holds their plain text."""
        return frozenset(map(int, getattr(self._tokenizer, "added_tokens_decoder", ())))

    @cached_property
    def _is_of_bytes(self) -> bool:
        """Whether the vocabulary is written in GPT-2's byte alphabet."""
        newline = self._tokenizer.convert_tokens_to_ids(_NEWLINE)
        return newline is not None and self._decoded([newline]) == b"\n"

    @cached_property
    def _before(self) -> list[int]:
        """Any word, to decode a token behind it."""
        return list(self._tokenizer.encode("a", add_special_tokens=False))

    def _decoded(self, ids: list[int]) -> bytes:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)).encode("utf-8", "replace")


class Detokenizer:
    """The text of one answer. shown: control tokens that are part of the text."""

    def __init__(self, tokenizer: Any, shown: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._shown = frozenset(int(token) for token, word in added.items() if str(word) in shown)
        self._ids: list[int] = []
        self._begin = self._emitted = 0  # first token of the decoded window; number of tokens whose text was emitted
        self._bytes, self._first = TokenBytes(tokenizer), True

    def add(self, token: int) -> str:
        """The text that this token makes certain: no later token changes it."""
        self._ids.append(token)
        window, before = self._decode(self._begin), self._decode(self._begin, self._emitted)
        if window.endswith(_INCOMPLETE) and len(self._ids) - self._emitted < _LONGEST_WAIT:
            return ""
        # Decoded together with the word before: some tokenizers drop a space at the start of a text.
        self._begin, self._emitted = self._emitted, len(self._ids)
        return window[len(before) :]

    def finish(self) -> str:
        """The text that was held back, when no token follows."""
        rest = self._decode(self._begin)[len(self._decode(self._begin, self._emitted)) :]
        self._emitted = len(self._ids)
        return rest

    def spelled(self, token: Token) -> Token:
        """The next token to be added, it and its alternatives with text and bytes."""
        top = tuple(one._replace(**self._spelling(one.id)) for one in token.top)
        spelled = token._replace(top=top, **self._spelling(token.id))
        self._first = self._first and not self._bytes.raw(token.id)
        return spelled

    def _spelling(self, token: int) -> dict[str, Any]:
        """Text and bytes that it adds to the answer; a control token adds none and is shown by its name."""
        raw = self._bytes.raw(token, first=self._first)
        return {"text": raw.decode("utf-8", "replace") or str(self._tokenizer.decode([token])), "raw": raw}

    def _decode(self, start: int, stop: int | None = None) -> str:
        runs = groupby(self._ids[start:stop], self._shown.__contains__)
        return "".join(str(self._tokenizer.decode(list(run), skip_special_tokens=not shown)) for shown, run in runs)


class StopTexts:
    """Ends a text in front of the first of these. ended: one has come.

    Text that may be the beginning of one is held back until it is decided.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(filter(None, stop))
        self._held = ""
        self.ended = False

    def add(self, text: str) -> str:
        """All of the held and new text that cannot be the beginning of a stop text."""
        if self.ended:
            return ""
        whole, self._held = self._held + text, ""
        found = min((at for stop in self._stop if (at := whole.find(stop)) >= 0), default=-1)
        if found >= 0:
            self.ended = True
            return whole[:found]
        most = len(whole) + 1  # stop texts may be long, and a piece of text is short
        begun = (n for stop in self._stop for n in range(1, min(len(stop), most)) if whole.endswith(stop[:n]))
        keep = max(begun, default=0)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def finish(self) -> str:
        """What was held back, when nothing follows."""
        rest, self._held = self._held, ""
        return rest

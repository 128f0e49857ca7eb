"""From messages to token ids and back: the model's chat template around passages, and the detokenizer of answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby, takewhile
from typing import Any, NamedTuple

from blend.errors import PromptError
from blend.prompt import Parts, TextTokenizer, apply_chat_template
from blend.serve.types import Function, Message, Role, Token, ToolCall
from blend.types import Place, PlaceOrigin, PromptLayout

# Private-use characters stand for the users' texts while the template is applied; no template contains or changes them.
_MARK = 0xE100
_MOST_MESSAGES = 4096
_PROBE = "\ue000"
_OPEN, _CLOSE = (
    "\ue001",
    "\ue002",
)  # around a client's text that the template writes and that spells control tokens
_PRIVATE = re.compile("[\ue000-\uf8ff]")
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


def template_message(turn: Turn, content: str) -> dict[str, Any]:
    """A message as chat templates take it: with the arguments of calls as objects, and without empty fields."""
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
    said = "" if calls and not any(turn.content) else content
    return {"role": turn.role, "content": said, **{name: value for name, value in more.items() if value}}


class ChatTemplate:
    """Tokenizes conversations. canonical_prefix: the prefix behind which the caches of passages were computed.

    Raises `PromptError` if `tokenizer` is None.
    """

    def __init__(self, tokenizer: Any, canonical_prefix: tuple[int, ...]) -> None:
        if tokenizer is None:
            raise PromptError("this decoder has no tokenizer, so it cannot be asked in words")
        self._tokenizer, self._text, self._canonical_prefix = tokenizer, TextTokenizer(tokenizer), canonical_prefix

    def layout(self, turns: Sequence[Turn], arguments: Mapping[str, Any] = DIRECT) -> PromptLayout:
        """The prompt of a conversation. Raises `PromptError` if the template refuses it. arguments: for the template."""
        return self._laid(list(self._items(turns, arguments)))

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

    def _items(self, turns: Sequence[Turn], arguments: Mapping[str, Any]) -> Iterator[tuple[str, bool] | Place]:
        """The prompt in order: text, each with whether it is the template's own, and passages."""
        marks = {chr(_MARK + number): turn for number, turn in enumerate(turns)}
        messages = [self._guarded(template_message(turn, "")) for turn in turns]
        for message, (mark, turn) in zip(messages, marks.items(), strict=True):
            message["content"] = template_message(turn, mark)["content"]
        text = self._apply(messages, self._guarded(arguments))
        missing = [turn.role for mark, turn in marks.items() if mark not in text and not turn.tool_calls]
        if missing:
            raise PromptError(f"the model's chat template has no place for a message of the role {missing[0]!r}")
        own, trusted = "", True
        for character in text:
            if character in (_OPEN, _CLOSE):
                yield own, trusted
                own, trusted = "", character == _CLOSE
            elif character in marks:
                yield own, trusted
                own = ""
                yield from self._written(marks[character])
            else:
                own += character
        yield own, trusted

    def _guarded(self, value: Any) -> Any:
        """A client's JSON for the template, with marks around texts that would yield control tokens."""
        if isinstance(value, Mapping):
            return {self._guarded(name): self._guarded(one) for name, one in value.items()}
        if isinstance(value, list):
            return [self._guarded(one) for one in value]
        if not isinstance(value, str):
            return value
        if _PRIVATE.search(value):
            raise PromptError(
                "tools, calls and arguments of the template must not hold private-use characters (U+E000 to U+F8FF)"
            )
        return value if self._text.control.isdisjoint(self._text.template(value)) else f"{_OPEN}{value}{_CLOSE}"

    def _written(self, turn: Turn) -> Iterator[tuple[str, bool] | Place]:
        last = len(turn.content) - 1
        for number, one in enumerate(turn.content):
            if isinstance(one, Place):
                yield one
                continue
            if turn.role == "tool" and self._quotes_results:
                one = json.dumps(one, ensure_ascii=False)[1:-1]
            elif self._trims:
                one = one.lstrip() if number == 0 else one
                one = one.rstrip() if number == last else one
            yield one, False

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template writes tools into the prompt."""
        asked, tool = [{"role": "user", "content": _PROBE}], Function(_PROBE, "", {"type": "object", "properties": {}})
        return self._apply(asked) != self._apply(asked, {**DIRECT, "tools": [tool.described]})

    @cached_property
    def _quotes_results(self) -> bool:
        """Whether the template writes the results of tools as JSON strings, as Llama 3's does."""
        call = ToolCall("a23456789", "f", "{}")
        turns = (
            Turn("user", (_PROBE,)),
            Turn("assistant", (), (call,)),
            Turn("tool", (_PROBE,), (), call.id, call.name),
        )
        return f'\\"{_PROBE}' in self._apply([template_message(turn, f'"{_PROBE}') for turn in turns])

    @cached_property
    def _trims(self) -> bool:
        """Whether the template trims messages, as Llama 3's does."""
        return f" {_PROBE} " not in self._apply([{"role": "user", "content": f" {_PROBE} "}])

    def _apply(self, messages: list[dict[str, Any]], arguments: Mapping[str, Any] = DIRECT) -> str:
        if len(messages) > _MOST_MESSAGES:
            raise PromptError(f"the conversation has {len(messages)} messages; shorten it to {_MOST_MESSAGES}")
        try:
            return apply_chat_template(self._tokenizer, messages, **arguments)
        except Exception as error:  # whatever the template's author raises
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise PromptError(f"the model's chat template refuses these messages: {why}") from None

    def _laid(self, items: Sequence[tuple[str, bool] | Place]) -> PromptLayout:
        """The layout: prefix before the first passage, suffix behind the last one."""
        runs: list[Parts] = [[]]
        passages: list[Place] = []
        for item in items:
            if isinstance(item, Place):
                passages.append(item)
                runs.append([])
            elif item[0]:
                runs[-1].append(item)
        texts = [tuple(self._text.join(run)) if run else () for run in runs]
        if not passages:
            return self.plain(texts[0])
        if not texts[0] or not texts[-1]:
            raise PromptError("the prompt needs text in front of its passages and behind them")
        return self._between(texts, passages)

    def _between(self, texts: Sequence[tuple[int, ...]], passages: Sequence[Place]) -> PromptLayout:
        places = list[Place]()
        for passage, behind in zip(passages, (*texts[1:-1], ()), strict=True):
            places.append(passage)
            if behind:
                places.append(Place(behind, PlaceOrigin.TEXT))
        return PromptLayout(texts[0], tuple(places), texts[-1], self._canonical_prefix)

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

"""Conversations -> prompts: the model's own chat template around text in which chunks have caches of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from blend.errors import PromptError
from blend.prompt import Parts, TextTokenizer, apply_chat_template
from blend.serve.types import Message, Role
from blend.types import Part, PromptLayout

# Private-use characters stand for what users wrote while the template is applied: no template contains or changes them.
_MARK = 0xE100
_MOST_MESSAGES = 4096
_PROBE = "\ue000"
DIRECT: Mapping[str, Any] = {"enable_thinking": False}
"""Arguments with which models that reason answer without a chain of thought."""


class Passage(NamedTuple):
    """Text with a cache of its own. ids: in the prompt. part: where these are only some rows of a stored chunk."""

    ids: tuple[int, ...]
    part: Part | None = None


Written = Sequence[str | Passage]
"""A message's content: ordinary text and passages, one after another."""


class Turn(NamedTuple):
    """One message of a conversation as it is to stand in the prompt."""

    role: Role
    content: Written


class ChatTemplate:
    """Puts conversations into prompts. canonical_prefix: the one that the caches of passages are kept behind.

    Raises `PromptError` for None: a decoder without a tokenizer.
    """

    def __init__(self, tokenizer: Any, canonical_prefix: tuple[int, ...]) -> None:
        if tokenizer is None:
            raise PromptError("this decoder has no tokenizer, so it cannot be asked in words")
        self._tokenizer, self._text, self._canonical_prefix = tokenizer, TextTokenizer(tokenizer), canonical_prefix

    def layout(self, turns: Sequence[Turn], arguments: Mapping[str, Any] = DIRECT) -> PromptLayout:
        """Token ids of a conversation, ready for its answer. Raises `PromptError` for one that the template refuses.

        arguments: for the template.
        """
        return self._laid(list(self._items(turns, arguments)))

    def continued(self, content: Written) -> PromptLayout:
        """Token ids of plain text that is to be continued, with what the model expects at the start."""
        texts = [one if isinstance(one, Passage) else (one, False) for one in content]
        return self._laid([(self.opening, True), *texts])

    @property
    def opening(self) -> str:
        """What the model expects at the start of every text; may be empty."""
        bos = self._tokenizer.bos_token if getattr(self._tokenizer, "add_bos_token", False) else ""
        return bos or ""

    def _items(self, turns: Sequence[Turn], arguments: Mapping[str, Any]) -> Iterator[tuple[str, bool] | Passage]:
        """The prompt's text in order: the template's own, users', and passages."""
        marks = {chr(_MARK + number): turn for number, turn in enumerate(turns)}
        text = self._apply([{"role": turn.role, "content": mark} for mark, turn in marks.items()], arguments)
        missing = [turn.role for mark, turn in marks.items() if mark not in text]
        if missing:
            raise PromptError(f"the model's chat template has no place for a message of the role {missing[0]!r}")
        own = ""
        for character in text:
            if character not in marks:
                own += character
                continue
            yield own, True
            own = ""
            yield from self._written(marks[character])
        yield own, True

    def _written(self, turn: Turn) -> Iterator[tuple[str, bool] | Passage]:
        last = len(turn.content) - 1
        for number, one in enumerate(turn.content):
            if isinstance(one, Passage):
                yield one
                continue
            if self._trims:
                one = one.lstrip() if number == 0 else one
                one = one.rstrip() if number == last else one
            yield one, False

    @cached_property
    def _trims(self) -> bool:
        """Whether the template trims messages, as those of Llama 3 do."""
        return f" {_PROBE} " not in self._apply([{"role": "user", "content": f" {_PROBE} "}])

    def _apply(self, messages: list[dict[str, str]], arguments: Mapping[str, Any] = DIRECT) -> str:
        if len(messages) > _MOST_MESSAGES:
            raise PromptError(f"the conversation has {len(messages)} messages; shorten it to {_MOST_MESSAGES}")
        try:
            return apply_chat_template(self._tokenizer, messages, **arguments)
        except Exception as error:  # whatever the template's author raises
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise PromptError(f"the model's chat template refuses these messages: {why}") from None

    def _laid(self, items: Sequence[tuple[str, bool] | Passage]) -> PromptLayout:
        """Items put into a layout: before the first passage the prefix, behind the last one the suffix."""
        runs: list[Parts] = [[]]
        passages: list[Passage] = []
        for item in items:
            if isinstance(item, Passage):
                passages.append(item)
                runs.append([])
            elif item[0]:
                runs[-1].append(item)
        texts = [tuple(self._text.join(run)) if run else () for run in runs]
        if not passages:
            return self._plain(texts[0])
        if not texts[0] or not texts[-1]:
            raise PromptError("the prompt needs text in front of its passages and behind them")
        return self._between(texts, passages)

    def _between(self, texts: Sequence[tuple[int, ...]], passages: Sequence[Passage]) -> PromptLayout:
        chunks, plain, parts = list[tuple[int, ...]](), set[int](), dict[int, Part]()
        for passage, behind in zip(passages, (*texts[1:-1], ()), strict=True):
            if passage.part is not None:
                parts[len(chunks)] = passage.part
            chunks.append(passage.ids)
            if behind:
                plain.add(len(chunks))
                chunks.append(behind)
        return PromptLayout(texts[0], tuple(chunks), texts[-1], frozenset(plain), parts, self._canonical_prefix)

    def _plain(self, ids: tuple[int, ...]) -> PromptLayout:
        if len(ids) < 2:
            raise PromptError("the prompt is empty; ask something")
        return PromptLayout(ids[:-1], (), ids[-1:], canonical_prefix=self._canonical_prefix)


def question_turns(messages: Sequence[Message], passages: Sequence[Passage], instructions: str) -> list[Turn]:
    """A conversation whose last message is asked over documents.

    They stand in front of it, the `instructions` in front of them; the messages are as they were sent.
    """
    *before, last = messages
    opening = f"{instructions.strip()}\n\n" if instructions.strip() else ""
    return [*(Turn(one.role, (one.content,)) for one in before), Turn("user", (opening, *passages, last.content))]

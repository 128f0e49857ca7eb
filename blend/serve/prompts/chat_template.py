"""Conversations as a model reads them: the chat template over real content, cut at the passages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from itertools import chain, islice, takewhile
from typing import Any, NamedTuple

from blend.errors import PromptError, first_line
from blend.layout import Place, PlaceOrigin, PromptLayout, common_length
from blend.prompt_template import TextTokenizer, apply_chat_template
from blend.serve.request import Function, Mark, Message, Request, Role, ToolCall

_MOST_MESSAGES = 4096
_PRIVATE_USE = range(0xF0000, 0x10FFFE)
DIRECT: Mapping[str, Any] = {"enable_thinking": False}
"""Template arguments with which reasoning models answer directly."""

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


def template_message(turn: Turn) -> dict[str, Any]:
    """A message as chat templates take it, without passages.

    The arguments of calls are objects, and empty fields are left out.
    """
    calls = list[dict[str, Any]]()
    for call in turn.tool_calls:
        function = {"name": call.name, "arguments": json.loads(call.arguments)}
        calls.append({"id": call.id, "type": "function", "function": function})
    optional = {
        "tool_calls": calls,
        "tool_call_id": turn.tool_call_id,
        "name": turn.name,
        "reasoning_content": turn.thoughts,
    }
    present = {name: value for name, value in optional.items() if value}
    content = "".join(part for part in turn.content if isinstance(part, str))
    return {"role": turn.role, "content": content, **present}


class _TemplateInput:
    """A conversation as a template takes it, in which private-use characters mark passages, and where texts are cut.

    The characters stand nowhere in the conversation, and a template takes them for letters.
    """

    def __init__(self, turns: Sequence[Turn], arguments: Mapping[str, Any]) -> None:
        self._contents = [turn.content for turn in turns]
        self._messages = [template_message(turn) for turn in turns]
        self._arguments = arguments
        self.passages = [part for content in self._contents for part in content if isinstance(part, Place)]
        used = frozenset(json.dumps([self._messages, arguments], ensure_ascii=False, default=str))
        unused = (character for character in map(chr, _PRIVATE_USE) if character not in used)
        self.cut, *self._marks = islice(unused, 1 + len(self.passages))

    def changed(self, content: Change, other: Change) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Messages and arguments for the template, with the texts of contents and all other texts changed."""
        marks = iter(self._marks)
        messages = []
        for message, parts in zip(self._messages, self._contents, strict=True):
            written = [content(part) if isinstance(part, str) else next(marks) for part in parts]
            changed = _changed({**message, "content": ""}, other)
            messages.append({**changed, "content": "".join(written)})
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
        return {_changed(name, change): _changed(item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


class ChatTemplate:
    """Tokenizes conversations.

    canonical_prefix: the prefix behind which the caches of passages were computed. instructions: stand before passages.
    """

    def __init__(self, tokenizer: Any, canonical_prefix: tuple[int, ...], instructions: str = "") -> None:
        self._tokenizer = tokenizer
        self._text = TextTokenizer(tokenizer)
        self._canonical_prefix = canonical_prefix
        self._instructions = instructions

    def prompt(
        self, request: Request, passages: Sequence[Place] = (), messages: Sequence[Message] | None = None
    ) -> PromptLayout:
        """The prompt of a request with these passages. messages: instead of the request's. Raises as `layout` does."""
        if request.prompt is not None:
            return self.continued(request.prompt)
        turns = question_turns(messages or request.messages, passages, self._instructions)
        arguments = DIRECT if request.template is None else request.template
        if request.tools is not None:
            arguments = {**arguments, "tools": [function.described for function in request.tools.functions]}
        return self.layout(turns, arguments)

    def reach(self, mark: Mark, request: Request, passages: Sequence[Place], layout: PromptLayout) -> int:
        """How many of a prompt's tokens a mark keeps: those that it shares with the prompt of other text behind the mark."""
        if mark.message is None:
            return layout.rows
        messages = list(request.messages)
        marked = messages[mark.message]
        behind = marked.content[mark.characters :]
        if mark.message == len(messages) - 1 and not behind:
            return layout.rows
        content = marked.content[: mark.characters] + (_other_than(behind) if behind else "")
        messages[mark.message] = marked._replace(content=content)
        for number in range(mark.message + 1, len(messages)):
            messages[number] = messages[number]._replace(content=_other_than(messages[number].content))
        try:
            other_prompt = self.prompt(request, passages, messages)
        except PromptError:  # a template that asks more of a message's text
            return layout.rows
        return common_length(layout.token_ids, other_prompt.token_ids)

    def layout(self, turns: Sequence[Turn], arguments: Mapping[str, Any] = DIRECT) -> PromptLayout:
        """The prompt that the template makes of a conversation, cut at its passages.

        Its control tokens are the template's own. Where the client's texts add some, they are cut there, and keep their other
        ids; if the template then decides otherwise, all texts are cut everywhere.

        Args:
            turns: The conversation.
            arguments: Arguments of the template.

        Raises:
            PromptError: The template refuses the conversation, or leaves out passages.

        """
        template_input = _TemplateInput(turns, arguments)
        cut = template_input.cut
        runs = template_input.runs
        in_pieces = cache(lambda text: cut.join(self._text.pieces(text)))
        in_fragments = cache(lambda text: cut.join(self._text.fragments(text)))
        text = self._apply(*template_input.changed(str, str))
        outline = self._apply(*template_input.changed(lambda text: cut if text else "", in_pieces))
        ids = [self._text.join(run) for run in runs(text)]
        control = self._text.only_control(ids)
        # Around contents of one character the template writes its own control tokens alone.
        own_control = self._own_control(runs(outline))
        if control != own_control:
            pieces = self._apply(*template_input.changed(in_pieces, in_pieces))
            cut_ids = [self._text.join(run) for run in runs(pieces)]
            if pieces.replace(cut, "") == text and self._text.only_control(cut_ids) == own_control:
                # Only the texts that spell a control token are cut: the others keep their ids of earlier turns.
                return self._laid(cut_ids, template_input.passages)
            safe = self._apply(*template_input.changed(in_fragments, in_pieces))
            if safe.replace(cut, "") == text or control != self._own_control(runs(safe)):
                ids = [self._text.join(run) for run in runs(safe)]
        return self._laid(ids, template_input.passages)

    def _own_control(self, runs: Sequence[Sequence[str]]) -> list[int]:
        """The control tokens of texts in pieces."""
        return self._text.only_control(self._text.template(piece) for piece in chain.from_iterable(runs))

    def continued(self, prompt: str | tuple[int, ...]) -> PromptLayout:
        """The prompt of token ids, or of a plain text, which begins as the tokenizer begins every text."""
        if isinstance(prompt, str):
            prompt = (*self._opening, *self._text.text(prompt))
        return self._plain(prompt)

    @cached_property
    def _opening(self) -> tuple[int, ...]:
        """Ids that the tokenizer puts in front of every text.

        No attribute names them: Llama 3 adds its first token in a post-processor.
        """
        encoded = self._tokenizer("a", return_special_tokens_mask=True)
        opening = list(takewhile(bool, encoded["special_tokens_mask"]))
        return tuple(encoded["input_ids"][: len(opening)])

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template writes tools into the prompt."""
        messages = [{"role": "user", "content": "Hello."}]
        tool = Function("f", "", {"type": "object", "properties": {}})
        with_tools = {**DIRECT, "tools": [tool.described]}
        return self._apply(messages, DIRECT) != self._apply(messages, with_tools)

    def _apply(self, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        if len(messages) > _MOST_MESSAGES:
            raise PromptError(f"the conversation has {len(messages)} messages; shorten it to {_MOST_MESSAGES}")
        try:
            return apply_chat_template(self._tokenizer, messages, **arguments)
        except Exception as error:  # whatever the template's author raises
            raise PromptError(f"the model's chat template refuses these messages: {first_line(error)}") from None

    def _laid(self, texts: Sequence[Sequence[int]], passages: Sequence[Place]) -> PromptLayout:
        """The layout: prefix before the first passage, suffix behind the last one."""
        if not passages:
            return self._plain(tuple(texts[0]))
        if not texts[0] or not texts[-1]:
            raise PromptError("the prompt needs text in front of its passages and behind them")
        prefix, *between, suffix = map(tuple, texts)
        places = list[Place]()
        for passage, behind in zip(passages, (*between, ()), strict=True):
            places.append(passage)
            if behind:
                places.append(Place(behind, PlaceOrigin.TEXT))
        return PromptLayout(prefix, tuple(places), suffix, self._canonical_prefix)

    def _plain(self, ids: tuple[int, ...]) -> PromptLayout:
        """The prompt of these tokens, without passages. Raises `PromptError` for fewer than two."""
        if len(ids) < 2:
            raise PromptError("the prompt has less than two tokens; write more of it")
        return PromptLayout(ids[:-1], (), ids[-1:], self._canonical_prefix)


def _other_than(text: str) -> str:
    """A text that begins otherwise."""
    return "," if text.startswith(".") else "."


def question_turns(messages: Sequence[Message], passages: Sequence[Place], instructions: str) -> list[Turn]:
    """The conversation; with passages, `instructions` and these stand before the user's last message.

    Results of tools may follow that message; the passages stay where they were when the answer called the tools.
    """
    turns = [Turn(message.role, (message.content,), *message[2:]) for message in messages]
    if not passages:
        return turns
    instructions = instructions.strip()
    opening = f"{instructions}\n\n" if instructions else ""
    questions = [number for number, turn in enumerate(turns) if turn.role == "user"]
    if not questions:
        raise PromptError("documents need a message of the user's to stand before")
    question = questions[-1]
    content = (opening, *passages, *turns[question].content)
    turns[question] = turns[question]._replace(content=content)
    return turns

"""Makes the engine's prompts out of requests: passages first, then the chat template, then all text that can be reused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from blend.corpus import TitledText
from blend.errors import ContextLengthError, PromptError
from blend.limits import json_text
from blend.serve.prompt import Cited
from blend.serve.prompts.chat_template import DIRECT, Turn, question_turns, turn_of
from blend.serve.prompts.reuse import Reuse
from blend.serve.request import FieldError, GivenDocument, Message, Request
from blend.types import Place
from blend_retrieval.document import clean, clean_title

if TYPE_CHECKING:
    from blend.serve.prompts.tenant import TenantState
    from blend.serve.prompts.view import CorpusView
    from blend.types import PromptLayout

MOST_OF_A_TOKEN = 64  # characters: more than any text has per token on average
_COUNTED = 4096  # characters tokenized at a time to count them
_CUT_TOKENS = 32  # tokens that a cut inside a text may add to its count
_BLANK_LINES = re.compile(r"\n\s*\n\s*\n")  # more than one
Require = Callable[[], None]
"""Called between pieces of work; raises if the request is to be given up."""


def build_prompt(state: TenantState, request: Request, require: Require = lambda: None) -> Reuse:
    """The token ids of a request's prompt, and its passages.

    Raises `PromptError` and `ConfigError` for requests that cannot be answered, `RetrievalError` if there is nothing to
    retrieve from, `StoreError` if a corpus or document that it names cannot be read now.
    """
    _require_length(state, request, require)
    view = state.view(request.corpus)
    passages = list[Cited]()
    if request.prompt is not None:
        layout = _continued(state, request.prompt)
    else:
        _require_question(state, request)
        passages = _passages(state, view, request, require)
        require()
        layout = state.chat.layout(_turns(state, request, passages), _template_arguments(request))
    views = {request.corpus: view}
    if not request.corpus and all(passage.brought for passage in passages):  # any corpus may be the one of pasted text
        views |= {name: state.view(name) for name in state.all_corpora if name not in views}
    return state.reuse(layout, passages, views, request.user)


def _turns(state: TenantState, request: Request, passages: Sequence[Cited]) -> list[Turn]:
    """The conversation with its passages."""
    if not passages:
        return list(map(turn_of, request.messages))
    instructions = state.rag(request.corpus).prompt_config.chat_instructions
    return question_turns(request.messages, [passage.place for passage in passages], instructions)


def _continued(state: TenantState, prompt: str | tuple[int, ...]) -> PromptLayout:
    """The prompt of a text, or of token ids, which may be control tokens. Raises `PromptError` and `FieldError`."""
    if isinstance(prompt, str):
        return state.chat.continued((prompt,))
    tokens = state.rag().decoder.vocabulary
    if max(prompt) >= tokens:
        raise FieldError(f"prompt: there is no token {max(prompt):,}; give ids from 0 to {tokens - 1:,}", "prompt")
    return state.chat.plain(prompt)


def _template_arguments(request: Request) -> Mapping[str, Any]:
    arguments = DIRECT if request.template is None else request.template
    if request.tools is None:
        return arguments
    return {**arguments, "tools": [function.described for function in request.tools.functions]}


def _passages(
    state: TenantState,
    view: CorpusView,
    request: Request,
    require: Require,
) -> list[Cited]:
    """The documents that a question brings or names, and what it has retrieved."""
    passages = _given(state, view, request.documents, require)
    if request.top_k is None:
        return passages
    questions = [message.content for message in request.messages if message.role == "user"]
    if not questions:
        raise PromptError("there is no message of the user's to search the corpus with; add one, or leave out retrieve")
    places = {passage.place for passage in passages}
    retrieved = view.retrieved(questions, request.top_k)
    return passages + [passage for passage in retrieved if passage.place not in places]


def _given(
    state: TenantState,
    view: CorpusView,
    documents: Sequence[GivenDocument],
    require: Require,
) -> list[Cited]:
    """The documents that a question brings, each in one piece, and the chunks of those that it names."""
    passages: list[Cited] = []
    for number, document in enumerate(documents, 1):
        require()
        if document.text.strip():
            passages.append(_brought(state, document, number))
        elif document.id:
            passages += view.document(document.id) or _missing(state, document.id)
        tokens = sum(len(passage.place.tokens) for passage in passages)
        require_length(tokens, state.rag().decoder.context_length)
    return passages


def _brought(state: TenantState, document: GivenDocument, number: int) -> Cited:
    text = TitledText(clean_title(document.title), _BLANK_LINES.sub("\n\n", clean(document.text)))
    place = Place(state.rag().template.chunk_ids(text))
    name = document.id or f"document {number}"
    return Cited(place, "document", "", name, text.title, text.text, brought=True)


def _missing(state: TenantState, document: str) -> list[Cited]:
    """Raise `StoreError` if documents cannot be read now, else `PromptError`."""
    state.watch.require()
    raise PromptError(f"no document of the corpus has the id {document!r}; give its text, or an id that is there")


def _require_question(state: TenantState, request: Request) -> None:
    """Refuse conversations that ask nothing, and tools that the model would never see."""
    last = request.messages[-1] if request.messages else Message("user", "")
    if last.role == "assistant" or (last.role != "tool" and not last.content.strip()):
        raise PromptError("the last message must say something, and not be the assistant's")
    with_calls = any(message.role == "tool" or message.tool_calls for message in request.messages)
    if (request.tools is not None or with_calls) and not state.chat.takes_tools:
        field = "messages" if request.tools is None else "tools"
        raise FieldError(
            f"{field}: the model's chat template has no place for tools; ask without, or serve another", field
        )


def require_length(tokens: int, longest: int | None) -> None:
    """Raise `ContextLengthError` if a part of a prompt already has more tokens than the model reads."""
    if longest is not None and tokens > longest:
        message = f"the prompt has more than {longest:,} tokens, all that the model reads; shorten it"
        raise ContextLengthError(message, longest)


def _require_length(state: TenantState, request: Request, require: Require) -> None:
    """Refuse what cannot fit before it is cut into chunks, which takes far longer than counting its tokens."""
    longest = state.rag().decoder.context_length
    texts = _texts_of(request)
    characters = sum(map(len, texts)) + sum(len(document.title) for document in request.documents)
    if longest is None or characters <= longest:
        return
    if characters > longest * MOST_OF_A_TOKEN:
        raise ContextLengthError(
            f"the prompt has {characters:,} characters, more than the {longest:,} tokens that the model reads can hold; "
            "shorten it",
            longest,
        )
    tokens = 0
    for text in texts:
        for start in range(0, len(text), _COUNTED):
            require()
            words = " ".join(text[start : start + _COUNTED].split())  # blanks of a document may not reach the prompt
            tokens += max(0, state.rag().template.count(words) - _CUT_TOKENS)
            require_length(tokens, longest)


def _texts_of(request: Request) -> list[str]:
    """All texts of a request that its prompt holds."""
    texts = [request.prompt] if isinstance(request.prompt, str) else []
    for message in request.messages:
        texts += [message.content, message.thoughts, *(call.arguments for call in message.tool_calls)]
    texts += [document.text for document in request.documents]
    if request.tools is not None:
        texts += [json_text(function.described) for function in request.tools.functions]
    return texts

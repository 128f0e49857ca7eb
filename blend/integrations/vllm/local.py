"""Prompts put together in vLLM's own server, by its tokenizer: where its own model blends them, or nobody does."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from blend.config import CorpusConfig
from blend.errors import StoreError
from blend.integrations.vllm.questions import answer_request
from blend.serve.failures import STORE_UNREACHABLE
from blend.serve.limits import RequestLimits
from blend.serve.types import ASKED_FOR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blend.serve.tenant import Cited, TenantState
    from blend.types import PromptLayout

CORPUS_OPTIONS = frozenset({"chunk_tokens", "codec", "embedder", "top_k"})
"""Options of the connector that are entries of `CorpusConfig`."""


def corpus_config(options: Mapping[str, Any]) -> CorpusConfig:
    """Of the connector's options. Raises `ConfigError`."""
    return CorpusConfig(**{name: options[name] for name in CORPUS_OPTIONS & set(options)})


class _Reader(NamedTuple):
    """What a room needs of a decoder to put documents into a prompt."""

    tokenizer: Any
    context_length: int | None = None


class LocalPrompt(NamedTuple):
    """A prompt. corpus: whose chunks are in it. sources: what its reply is to say of its passages. generation: of the store.

    reason: why it must not be blended; "" where it may be. brought: places of its chunks whose text came with the request.
    """

    layout: PromptLayout
    corpus: str = ""
    sources: tuple[dict[str, Any], ...] = ()
    generation: str = ""
    reason: str = ""
    brought: frozenset[int] = frozenset()


class LocalPrompts:
    """tokenizer: HuggingFace's, which vLLM has anyway. options: of a connector with a store; None where there is none.

    Without a store documents become a prompt, and there is no corpus to be searched. Threads may share it.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None) -> None:
        self._tokenizer, self._options = tokenizer, options
        self._room: TenantState | None = None

    def prompt(self, part: Mapping[str, Any]) -> LocalPrompt | None:
        """A prompt with its passages; `part`: see `questions.part_of`. None where there is no passage in it.

        Raises `ApiError`, `BlendError` or `RetrievalError` for what cannot be put into a prompt.
        """
        from blend.serve.service import build_prompt

        room = self._made()
        names = () if self._options is None else room.corpora
        request = answer_request(part, names, RequestLimits(top_k=room.rag().corpus_config.top_k))
        reason, generation = self._reason(room)
        request = build_prompt(room, request)
        layout, cited = request.layout, request.cited
        if not cited:
            return None
        reason = ASKED_FOR if request.method == "full" else reason
        sources = tuple(map(told_of, cited))
        return LocalPrompt(layout, request.corpus, sources, generation, reason, _brought(layout, cited))

    def _reason(self, room: TenantState) -> tuple[str, str]:
        """Why nothing can be blended now, and otherwise the store's generation, before anything of it is read."""
        if self._options is None:
            return "", ""
        if room.watch.reachable():
            with suppress(StoreError):
                return "", room.rag().store.generation
        return STORE_UNREACHABLE, ""

    def _made(self) -> TenantState:
        if self._room is None:
            from blend.rag import Rag
            from blend.serve.tenant import TenantState

            options = self._options or {}
            config, reader = corpus_config(options), cast(Any, _Reader(self._tokenizer))
            rag = Rag(options.get("store") or "/nonexistent", decoder=reader, corpus=config)
            if self._options is not None and "embedder" not in options:
                rag.take_embedder_of_index()
            self._room = TenantState(rag, 0)
        return self._room


def _brought(layout: PromptLayout, cited: Sequence[Cited]) -> frozenset[int]:
    places = [place for place in range(len(layout.chunks)) if place not in layout.plain]
    return frozenset(place for place, one in zip(places, cited, strict=True) if one.brought)


def told_of(one: Cited) -> dict[str, Any]:
    """A passage in the words of `blend serve`, without whether its cache is there, which is known later."""
    return {
        "kind": one.kind,
        "id": one.id,
        "document": one.document,
        "title": one.title,
        "text": one.text,
        "score": one.score,
        "tokens": len(one.passage.ids),
    }

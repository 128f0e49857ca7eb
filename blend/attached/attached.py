"""`attach`: a hook that puts blended rows into the caches of a model's own `generate`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from blend.attached.calls import PromptCall, fill, last_rows, prompt_call
from blend.attached.hooks import HookWatch
from blend.attached.known import KnownTexts
from blend.config import BlendConfig, CorpusConfig
from blend.errors import ConfigError, PromptError, StoreError
from blend.layout import Tokens
from blend.model.decoder import Decoder
from blend.prefill.blender import Blend
from blend.rag import Rag
from blend.serve.engine.savings import reason_against
from blend.serve.limits import MEMORY_BUDGET
from blend.stopwatch import Progress, no_progress
from blend.store import ChunkPool, open_store

if TYPE_CHECKING:
    from os import PathLike


LEARN_BUDGET = 2 << 30  # bytes of caches of text that prompts brought
NOTHING_KNOWN = "nothing known"
_ATTACHED: WeakSet[torch.nn.Module] = WeakSet()


@dataclass(frozen=True)
class Attachment:
    """What was done for the last prompt, or the last batch of prompts.

    Attributes:
        rows: tokens of the prompts, without padding.
        rows_stored: rows of stored text among them.
        rows_computed: rows that were computed in every layer; all of them in a prompt without known text.
        hits: stored passages that were used.
        learned: passages whose caches were computed before this prompt: text that came for the second time, or for the first
            time since weights or adapters changed.
        seconds: of the blended prefill, without the model's last rows; of looking for known text otherwise.
        reason: why nothing was blended; "" if something was.

    """

    rows: int = 0
    rows_stored: int = 0
    rows_computed: int = 0
    hits: int = 0
    learned: int = 0
    seconds: float = 0.0
    reason: str = ""


def attach(
    model: Any,
    tokenizer: Any = None,
    store: str | PathLike[str] | None = None,
    *,
    config: BlendConfig | None = None,
    learn_budget: int = LEARN_BUDGET,
) -> Attached:
    """Let the model's own `generate` use known text wherever it stands in a prompt.

    >>> import blend
    >>> with blend.attach(model, tokenizer) as attached:
    ...     first = model.generate(**inputs, max_new_tokens=8)
    ...     attached.learn(DOCUMENT)
    1
    >>> attached.last.reason
    'nothing known'

    Known are the chunks of the store's corpora, text that `Attached.learn` was given, and text of earlier prompts from the
    second time on that it comes. A prompt without known text gives exactly what it gives without `attach`.

    Args:
        model: a HuggingFace causal language model. It is as before when the attachment ends.
        tokenizer: its tokenizer; by default it is loaded from where the model came from.
        store: the folder of a store, as `blend precompute --store` makes it. None: in memory, until the attachment ends.
        config: how rows are chosen. With `reproducible`, nothing is learned from prompts.
        learn_budget: bytes of caches of text that prompts brought; 0 learns nothing.

    Returns:
        The attachment, which is a context manager.

    Raises:
        UnsupportedModelError: the model cannot be blended.
        ConfigError: there is no tokenizer, or the model is attached already.

    """
    return Attached(model, tokenizer, store, config or BlendConfig(), learn_budget)


class Attached:
    """A model whose own `generate` uses known text, until `close` or the end of a `with` block. See `attach`.

    last: what was done for the last prompt.
    """

    def __init__(
        self, model: Any, tokenizer: Any, store: str | PathLike[str] | None, config: BlendConfig, learn_budget: int
    ) -> None:
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT
        if inner in _ATTACHED:
            raise ConfigError("this model is attached already: close that attachment first")
        self._model = inner
        self._was_training = inner.training
        try:
            decoder = Decoder(inner, tokenizer or _tokenizer_of(inner))
        except BaseException:
            inner.train(self._was_training)
            raise
        self._folder = TemporaryDirectory(prefix="kvblend-") if store is None else None
        root = Path(self._folder.name) if self._folder is not None else Path(store or "")
        # In memory no contextual caches: they take twice the time to learn.
        corpus = CorpusConfig(surrogate_tokens=0) if self._folder is not None else CorpusConfig()
        rag = Rag(root, decoder=decoder, blend=config, corpus=corpus, memory=ChunkPool(MEMORY_BUDGET))
        if self._folder is not None:
            rag.store = open_store("memory:", budget_bytes=learn_budget or None)
        rag.take_embedder_of_index()
        self._known = KnownTexts(rag, config, learn_budget)
        self._blender = self._known.blender
        if self._folder is None and HookWatch(inner).present:
            raise ConfigError(
                "the model has forward hooks, which may change what it computes, and a store knows no hooks: "
                "attach without a store, or remove the hooks"
            )
        self._lock = decoder.lock
        self._own = threading.local()  # passes of this attachment in this thread
        self.last = Attachment()
        self._hooks = [
            inner.register_forward_pre_hook(self._before, with_kwargs=True),
            inner.register_forward_hook(self._after, always_call=True),
        ]
        self._watch_hooks = HookWatch(inner)
        _ATTACHED.add(inner)

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Detach: the model is as it was before. Calling it twice is fine."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        _ATTACHED.discard(self._model)
        self._model.train(self._was_training)
        if self._folder is not None:
            self._folder.cleanup()

    def learn(self, *texts: str, progress: Progress = no_progress) -> int:
        """Compute the caches of texts now, so that the first prompt that holds them gains.

        The first call also fits the KV correction, which takes as long as some prompts of 2,000 tokens.

        Args:
            texts: documents, or parts of them, as prompts will hold them.
            progress: called with stage, done and total.

        Returns:
            How many passages are known now that were not known before.

        Raises:
            StoreError: the store cannot be written.

        """
        with self._lock, self._passes_of_its_own():
            return self._known.learn(texts, progress)

    def _before(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Look at a call of `forward`: put known text into its cache, and leave it the last rows."""
        if self._is_within:
            return None
        stack = ExitStack()  # until `_after`: a blended pass changes the model's attention, in all threads
        stack.enter_context(self._lock)
        self._running.append(stack)
        call = prompt_call(self._blender, args, kwargs)
        if call is None:
            return None
        if not isinstance(call, str) and self._watch_hooks.changed:
            call = "hooks came to the model, or went, after it was attached"
        if isinstance(call, str):
            self.last = Attachment(reason=call)
            return None
        with self._passes_of_its_own(), torch.inference_mode():
            blends = self._blends(call)
        if not blends:
            return None
        fill(call, blends)
        return args, last_rows(kwargs, call.keep)

    def _after(self, *_: object) -> None:
        if self._running and not self._is_within:
            self._running.pop().close()

    @property
    def _running(self) -> list[ExitStack]:
        """The caller's calls in this thread, each with the model's lock."""
        if not hasattr(self._own, "running"):
            self._own.running = []
        running: list[ExitStack] = self._own.running
        return running

    @property
    def _is_within(self) -> bool:
        """Whether this thread runs the model for this attachment, and not for the caller."""
        return getattr(self._own, "depth", 0) > 0

    @contextmanager
    def _passes_of_its_own(self) -> Iterator[None]:
        self._own.depth = getattr(self._own, "depth", 0) + 1
        try:
            yield
        finally:
            self._own.depth -= 1

    def _blends(self, call: PromptCall) -> Mapping[Tokens, Blend]:
        """The blended prefill of each prompt; nothing if no prompt has known text worth it, or on an error."""
        begin = perf_counter()
        distinct = list(dict.fromkeys(call.ids))
        behind = len(call.ids) if self._blender.decoder.recurrent else 0  # last tokens, which only the model computes
        rows = sum(map(len, call.ids)) + behind
        try:
            self._blender.follow_weights()
            learned = self._known.compute_recurring(distinct)
            layouts = {ids: self._known.layout(ids) for ids in distinct}
            learned += sum(map(self._known.compute_missing, layouts.values()))
            plain = {
                ids for ids, layout in layouts.items() if reason_against(self._blender, layout, self._blender.config)
            }
            blends = dict[Tokens, Blend]()
            if len(plain) < len(layouts):
                for ids, layout in layouts.items():
                    blends[ids] = self._known.prefill(layout.all_plain() if ids in plain else layout)
            reason = "" if blends else NOTHING_KNOWN
        except (StoreError, PromptError) as error:
            self.last = Attachment(rows, 0, rows, seconds=perf_counter() - begin, reason=str(error))
            return {}
        for layout in layouts.values():
            self._known.note_new(layout)
        stored = [
            len(place.tokens)
            for blend in blends.values()
            for place, hit in zip(blend.layout.places, blend.hits, strict=True)
            if hit
        ]
        computed = sum(blend.rows_recomputed for blend in blends.values()) + behind if blends else rows
        self.last = Attachment(rows, sum(stored), computed, len(stored), learned, perf_counter() - begin, reason)
        return blends


def _tokenizer_of(model: Any) -> Any:
    """The tokenizer that lies beside the model's weights. Raises `ConfigError`."""
    from transformers import AutoTokenizer

    name = getattr(model.config, "name_or_path", "")
    with suppress(OSError, ValueError):
        if name:
            return AutoTokenizer.from_pretrained(name)
    raise ConfigError("no tokenizer was found beside the model's weights; give it: blend.attach(model, tokenizer)")

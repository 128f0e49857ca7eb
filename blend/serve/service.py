"""The service: answers requests of many tenants over one engine, and uses its idle time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from blend.errors import StoreError
from blend.serve.audit import Auditor, verified
from blend.serve.documents.documents import Documents, indexing_turns
from blend.serve.engine.profile import PrefillProfile
from blend.serve.engine.progress import EVERY_S
from blend.serve.events import Audit, OnEvent, QueueFullError
from blend.serve.failures import LOG
from blend.serve.flights import Flights, landing
from blend.serve.forms.grammar import GrammarCompiler
from blend.serve.forms.thoughts import markers_of
from blend.serve.forms.tool_calls import format_of
from blend.serve.idle import IdleWork
from blend.serve.limits import LEARN_BUDGET
from blend.serve.outputs.processor import OutputProcessor
from blend.serve.promises import Promises
from blend.serve.prompt import Prompt
from blend.serve.prompts.build import Rules, build_prompt, completed
from blend.serve.prompts.corrector import LearnedTextCorrector
from blend.serve.prompts.learned import Forgotten
from blend.serve.prompts.tenant import TenantState, begun_corpora, kept_corpora, tenant_root
from blend.serve.prompts.view import Require
from blend.serve.request import Request, RequestOrigin
from blend.serve.sessions import RunningSessions

if TYPE_CHECKING:
    from blend.rag import Rag
    from blend.serve.engine.scheduler import EmbeddedEngine
    from blend.serve.events import Figures
    from blend.store import ChunkStore

STAND_BY_EVERY_S = 5.0  # how often to look for corpora that other servers began
_LOOK_S = 0.5
_MOST_DOUBTED = 64  # blended prompts whose answers full recompute did not give


class _GivenUpError(Exception):
    """Idle-time work is given up."""


class Service:
    """Answers requests of many tenants over one engine. Threads may share it.

    Args:
        rag: the unnamed corpus of the unnamed tenant; its decoder answers.
        engine: the engine over that decoder.
        learn_budget: bytes of each tenant's store for caches of texts from requests; 0 learns nothing.
        full: never blend.
        profile: the estimate of full prefill.
        audit: share of blended answers to compare with full recompute in idle time.
        on_audit: called with the results.
        unnamed: the end user of requests that name none, if they all come from one; "" if they may come from several.

    Attributes:
        corrector: fits the KV corrections of learned text.

    """

    def __init__(
        self,
        rag: Rag,
        engine: EmbeddedEngine,
        *,
        learn_budget: int = LEARN_BUDGET,
        full: bool = False,
        profile: PrefillProfile | None = None,
        audit: float = 0.0,
        on_audit: Callable[[Audit], None] = lambda audit: None,
        unnamed: str = "",
    ) -> None:
        self.engine = engine
        self.full = full
        self.model = rag.decoder.name
        self.context_length = rag.decoder.context_length
        self.created = int(time.time())
        self._rag = rag
        self._learn_budget = learn_budget = 0 if rag.blend_config.reproducible else learn_budget
        self._profile = profile or PrefillProfile(rag.decoder)
        self._tenants = {"": TenantState(rag, learn_budget, flights=self._new_flights())}
        template = getattr(rag.decoder.tokenizer, "chat_template", None)
        self._form = format_of(template)
        self._rules = Rules(full, unnamed, markers_of(template))
        self._grammars = GrammarCompiler(rag.decoder, self._form)
        self._lock = threading.Lock()
        self._documents: dict[tuple[str, str], Documents] = {}
        self._sessions = RunningSessions()
        self._indexing = indexing_turns()
        self._open = True
        self.ready = False
        self._calibrating = False
        self._doubted: deque[Prompt] = deque(maxlen=_MOST_DOUBTED)
        promises = Promises()
        self._audits = Auditor(audit, lambda audit: on_audit(promises.judged(audit)), self._doubt)
        self._stand_by_at = 0.0
        self._idle = IdleWork(engine, self._next_audit, self._look_around)
        self.corrector = LearnedTextCorrector(self._learning, partial(self._calibrate, provisional=True))

    def warm_up(self) -> None:
        """Make the first answer as fast as the others, and time full prefill."""
        rag = self._rag
        _ = rag.blender.encoder(rag.template.prefix).prefix
        if rag.index_dir.exists():
            _ = rag.embedder
        if self._profile.seconds(1) is None:
            self._profile.measure()
        if not self.full:
            self._stand_by()
            if rag.blend_config.reproducible:
                self._complete_corpora()
            self._tenants[""].read_corpora()
        self.ready = True

    def _stand_by(self) -> None:
        """Continue the uploads of all corpora that an earlier server accepted, or another one that ends."""
        for tenant, corpus in sorted(kept_corpora(self._rag.root) - self._documents.keys()):
            self.documents(tenant, corpus)

    def _complete_corpora(self) -> None:
        """Compute the caches and KV corrections that the corpora lack: if they came later, they would change answers."""
        for (tenant, corpus), documents in list(self._documents.items()):
            while self._open and not documents.wait(EVERY_S):
                states = documents.listing()
                progress = {
                    "computed": sum(state.tokens_done for state in states),
                    "of": sum(state.tokens_total for state in states),
                }
                LOG.info("completing_corpus", extra={"tenant": tenant, "corpus": corpus, **progress})

    def tenant(self, tenant: str) -> TenantState:
        """The state of a tenant. Raises `ConfigError` for an invalid name."""
        with self._lock:
            state = self._tenants.get(tenant)
        if state is None:
            rag = self._rag.sibling("", tenant_root(self._rag.root, tenant))
            watch = self._tenants[""].watch
            # Reads files: other tenants do not wait.
            state = TenantState(rag, self._learn_budget, watch, flights=self._new_flights())
            with self._lock:
                state = self._tenants.setdefault(tenant, state)
        return state

    def _new_flights(self) -> Flights | None:
        """Compares the requests of one tenant."""
        return None if self.full else Flights(self._profile.seconds)

    def _learning(self) -> dict[str, TenantState]:
        """The tenants whose learned text serves prompts."""
        if self.full or not self.ready:
            return {}
        with self._lock:
            return {name: state for name, state in self._tenants.items() if state.learned}

    def rag(self, prompt: Prompt) -> Rag:
        """The corpus that a prompt's passages are from."""
        return self.tenant(prompt.request.tenant).rag(prompt.corpus)

    def require_store(self, tenant: str) -> None:
        """Raise `StoreError` if the tenant's store is unreachable."""
        self.tenant(tenant).watch.require()

    @property
    def stores(self) -> list[ChunkStore]:
        """The server's store and those of known tenants, if they can be opened; may take a while."""
        with self._lock:
            states = list(self._tenants.values())
        stores: list[ChunkStore] = []
        for state in states:
            with suppress(StoreError):
                stores.append(state.rag().store)
        return stores

    def corpora(self, tenant: str) -> tuple[str, ...]:
        """Names of a tenant's corpora; "" is the unnamed one."""
        return self.tenant(tenant).corpora

    def begun(self, tenant: str) -> set[str]:
        """The same, with those that have accepted documents and no index yet."""
        return {*self.corpora(tenant), *begun_corpora(tenant_root(self._rag.root, tenant))}

    def documents(self, tenant: str, corpus: str = "") -> Documents:
        """The documents of a tenant's corpus.

        Raises `ConfigError` for an invalid name, `StoreError` while the store is unreachable.
        """
        self.require_store(tenant)
        state = self.tenant(tenant)
        rag = state.rag(corpus)
        with self._lock:
            if not self._open:
                raise QueueFullError(0, 1.0)
            if (tenant, corpus) not in self._documents:
                # A calibration that this server's end cut short is not tried again.
                documents = Documents(
                    rag,
                    self.engine.encode,
                    calibrate=lambda *arguments: self._calibrate(rag, *arguments) or not self._open,
                    on_gone=state.forget,
                    tenant=tenant,
                    turns=self._indexing,
                )
                self._documents[tenant, corpus] = documents
                state.hide(corpus, lambda: documents.leaving)
            return self._documents[tenant, corpus]

    def _calibrate(
        self,
        rag: Rag,
        chunks: Sequence[tuple[int, ...]],
        anew: bool = False,
        give_up: Callable[[], bool] = lambda: False,
        *,
        provisional: bool = False,
    ) -> bool:
        """Measure the KV corrections while the engine is idle; False if given up, by `give_up` or because this is closed.

        Those of learned text, which are provisional, also wait for caches: without them nothing is blended.
        """

        def until_idle(*progress: object) -> None:
            while self._open and not give_up():
                if self.engine.wait_idle(_LOOK_S, prompts_alone=not provisional):
                    return
            raise _GivenUpError

        self._calibrating = True
        try:
            until_idle()
            rag.blender.calibrate(rag.template.prefix, chunks, anew=anew, provisional=provisional, progress=until_idle)
            return True
        except _GivenUpError:
            return False
        finally:
            self._calibrating = False

    def _look_around(self) -> None:
        """Take over what other servers began, and forget learned text that audits found wanting."""
        now = time.monotonic()
        if self.ready and not self.full and now >= self._stand_by_at:
            self._stand_by_at = now + STAND_BY_EVERY_S
            with suppress(StoreError, QueueFullError, OSError):
                self._stand_by()
        while self._doubted:
            prompt = self._doubted.popleft()
            with suppress(StoreError):  # it stays during an outage
                self.tenant(prompt.request.tenant).drop_learned(prompt.layout, prompt.request.user)

    def _doubt(self, prompt: Prompt, figures: Figures) -> None:
        """Full recompute gave another answer: trust neither the prompt's learned text nor rows that moved."""
        self._doubted.append(prompt)
        if figures.rows_moved or figures.rows_inexact:
            self.engine.doubt(prompt.request.tenant, prompt.author)

    def _next_audit(self) -> tuple[Prompt, OnEvent] | None:
        """The next audit, if nothing else is done in idle time."""
        return None if self._calibrating else self._audits.next()

    def submit(self, request: Request, on_event: OnEvent, require: Require = lambda: None) -> None:
        """Accept a request; its events go to `on_event`, from another thread.

        Raises as `prepare` and `compile` do, and `QueueFullError` when too many wait.
        """
        self.engine.require_room(request.tenant)  # before the search, which would be in vain
        self.take(self.compile(self.prepare(request, require)), on_event)

    def prepare(self, request: Request, require: Require = lambda: None) -> Prompt:
        """Make the prompt of a request, yet without the grammar of its answer. Raises as `build_prompt` does."""
        self._sessions.add(request)
        tenant = self.tenant(request.tenant)
        return completed(build_prompt(tenant, request, require), tenant, request, self._rules)

    def end_session(self, tenant: str, user: str, session: str) -> tuple[Forgotten, int]:
        """Forget the text and the prompts' rows that only this session of a user left. Its running requests leave none.

        Returns what was deleted of the store, and the bytes of rows in memory. Raises `StoreError`.
        """
        key = RequestOrigin(user, session).users_session
        self._sessions.end(tenant, key)
        rows = self.engine.prefixes.forget(tenant, key)
        self.engine.histories.forget(tenant, key)
        return self.tenant(tenant).end_session(user, session), rows

    def compile(self, prompt: Prompt) -> Prompt:
        """The prompt with the grammar of its answer, if that has a form. Raises `FieldError`."""
        request = prompt.request
        if not request.has_form:
            return prompt
        grammar = self._grammars.compile(request.schema, request.tools, prompt.thinking)
        return replace(prompt, grammar=grammar)

    def take(self, prompt: Prompt, on_event: OnEvent) -> None:
        """Hand a prompt with its grammar to the engine; see `submit`."""
        self._idle.interrupt()
        if prompt.request.verify:
            on_event = verified(self._take, prompt, on_event, self._doubt)
        on_event = self._audits.watched(prompt, on_event)
        if prompt.flight is None:
            self._take(prompt, on_event)
            return
        try:
            self._take(prompt, landing(prompt.flight, on_event))
        except BaseException:
            prompt.flight.end()
            raise

    def _take(self, prompt: Prompt, on_event: OnEvent) -> None:
        self.engine.submit(prompt, self._outputs(prompt, on_event).on_event)

    def _outputs(self, prompt: Prompt, on_event: OnEvent) -> OutputProcessor:
        watch = self.tenant(prompt.request.tenant).watch
        tokenizer = self._rag.decoder.tokenizer
        return OutputProcessor(tokenizer, prompt, on_event, self._profile, watch, self._form)

    def close(self, finish_s: float = 0.0) -> None:
        """Accept nothing more, and let running answers finish within `finish_s`."""
        self.ready = False
        with self._lock:
            self._open = False
            corpora = list(self._documents.values())
        self._idle.close()
        self.engine.close(finish_s)
        for documents in corpora:
            documents.close()
        self.corrector.close()

"""Fits the KV corrections of learned text, on text that every user may read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from blend.serve.failures import log_error
from blend.serve.prompts.trusted import trusted_chunks
from blend.types import CacheKind

if TYPE_CHECKING:
    from blend.layout import Tokens
    from blend.rag import Rag
    from blend.serve.prompts.tenant import TenantState

_LOOK_S = 0.5
_LAST_S = 10.0  # how long `close` waits for the thread


class LearnedTextCorrector:
    """A thread that fits the KV corrections which a tenant with learned text lacks, once, on trusted text.

    Args:
        tenants: finds the tenants with learned text, by name.
        fit: fits them in the corpus's store, on these chunks, while the engine is idle.

    Attributes:
        done: tenants whose learned text has its corrections, if they could be fitted.

    """

    def __init__(
        self, tenants: Callable[[], Mapping[str, TenantState]], fit: Callable[[Rag, list[Tokens]], object]
    ) -> None:
        self._tenants = tenants
        self._fit = fit
        self.done: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvblend-fitting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Start no further fit, and wait a little for the running one."""
        self._closing.set()
        self._thread.join(_LAST_S)

    def _run(self) -> None:
        while not self._closing.wait(_LOOK_S):
            for name, state in self._tenants().items():
                if name not in self.done and not self._closing.is_set():
                    self._correct(state.rag())
                    self.done.add(name)

    def _correct(self, rag: Rag) -> None:
        try:
            stored = [rag.blender.correction(rag.template.prefix, kind) for kind in CacheKind]
            if rag.blend_config.correction and not all(stored):
                self._fit(rag, trusted_chunks(rag))
        except Exception as error:  # the next server tries again
            log_error(error, "")

"""Why something failed, in words for a client. What a client may mend is told in the words of the error.

What only the operator can mend is told in words of this module, and in those of the error in the log: messages of stores and of
the system name paths, and those of bugs may hold anybody's text.
"""

from __future__ import annotations

import logging

from blend.errors import BlendError, ConfigError, PromptError, StoreError, first_line, is_out_of_memory
from blend_retrieval.errors import ChunkingError, DocumentsError, QueryError, RetrievalError

LOG = logging.getLogger("kvblend.serve")
MENDABLE = (PromptError, ConfigError, QueryError, DocumentsError, ChunkingError)
STORE_FAILS = "the store of chunk caches does not work now; the server's log says why"
CORPUS_FAILS = "the server cannot work on the corpus now; its log says why"


def reason_of(error: Exception) -> str:
    """Why a document is not ready, for its client, in one line."""
    if isinstance(error, MENDABLE):
        return first_line(error)
    return STORE_FAILS if isinstance(error, StoreError | OSError) else CORPUS_FAILS


def is_passing(error: Exception) -> bool:
    """Whether the store, the disk or memory is at fault and no document: what failed may work later."""
    operators = isinstance(error, BlendError | RetrievalError | OSError) and not isinstance(error, MENDABLE)
    return operators or is_out_of_memory(error)


def log_failure(error: Exception) -> None:
    """Tell the operator what kept documents from being ready, unless their client is told."""
    if not isinstance(error, MENDABLE):
        why = {"why": str(error)} if isinstance(error, StoreError | OSError | RetrievalError) else {}
        LOG.warning("documents_failed", extra={"told": {"error": type(error).__name__, **why}})

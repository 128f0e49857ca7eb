"""Failures: the words that a client gets, and those in the operator's log.

Clients get the messages of errors that they can fix. Other messages may name paths or quote texts: clients get fixed words
instead, and the log names the error and where it came from.
"""

from __future__ import annotations

import logging
import traceback

from blend.errors import (
    BlendError,
    ConfigError,
    EntryDamagedError,
    PromptError,
    StoreError,
    first_line,
    is_out_of_memory,
)
from blend_retrieval.errors import ChunkingError, DocumentsError, QueryError, RetrievalError

LOG = logging.getLogger("kvblend.serve")
CLIENT_ERRORS = (PromptError, ConfigError, QueryError, DocumentsError, ChunkingError)
STORE_FAILS = "the store of chunk caches does not work now; the server's log says why"
NOT_WRITABLE = "the store cannot be written now, so documents cannot be changed; the server's log says why"
CORPUS_FAILS = "the server cannot work on the corpus now; its log says why"
STORE_UNREACHABLE = "store_unreachable"  # why a prompt was computed in full


def log_error(error: BaseException, about: str) -> None:
    """Log an error's origin. Log its message only if it comes from a store or an index, because these quote no texts."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    places = [f"{frame.filename.rpartition('/site-packages/')[2]}:{frame.lineno} {frame.name}" for frame in frames]
    why = {"why": str(error)} if isinstance(error, StoreError | RetrievalError) else {}
    LOG.error("error", extra={"id": about, "error": type(error).__name__, **why, "at": places})


def log_failure(error: Exception) -> None:
    """Log why documents are not ready, unless the client gets the error's message."""
    if not isinstance(error, CLIENT_ERRORS):
        why = {"why": str(error)} if isinstance(error, StoreError | OSError | RetrievalError) else {}
        LOG.warning("documents_failed", extra={"error": type(error).__name__, **why})


def reason_of(error: Exception) -> str:
    """Why a document is not ready, for its client, in one line."""
    if isinstance(error, CLIENT_ERRORS):
        return first_line(error)
    return STORE_FAILS if isinstance(error, StoreError | OSError) else CORPUS_FAILS


def is_transient(error: Exception) -> bool:
    """Whether the store, the disk or memory is at fault, not a document: a retry may succeed."""
    operational = isinstance(error, BlendError | RetrievalError | OSError) and not isinstance(error, CLIENT_ERRORS)
    return operational or is_out_of_memory(error)


def is_outage(error: BaseException) -> bool:
    """Whether the store is unreachable, not just one entry damaged."""
    return isinstance(error, StoreError) and not isinstance(error, EntryDamagedError)

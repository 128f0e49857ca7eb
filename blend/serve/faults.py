"""What went wrong in a server, for its log: where it came from, without anybody's text."""

from __future__ import annotations

import logging
import traceback

from blend.errors import StoreError
from blend_retrieval.errors import RetrievalError

LOG = logging.getLogger("kvblend.serve")


def log_error(error: BaseException, about: str) -> None:
    """Where an error came from. Messages are left out, for they may quote anybody, but for those of a store or an index."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    places = [f"{frame.filename.rpartition('/site-packages/')[2]}:{frame.lineno} {frame.name}" for frame in frames]
    why = {"why": str(error)} if isinstance(error, StoreError | RetrievalError) else {}
    LOG.error("error", extra={"told": {"id": about, "error": type(error).__name__, **why, "at": places}})

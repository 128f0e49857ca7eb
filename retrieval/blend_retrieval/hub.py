"""Models of sentence-transformers: from a folder, the hub's cache or the model hub."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock, Thread
from typing import Any

from blend_retrieval.errors import EmbeddingError, ModelMissingError

WITHIN_S = 10.0
LOADING = RLock()
"""Held while weights are loaded: transformers replaces methods of its classes then, and two loads at once untie weights."""
LOG = logging.getLogger("kvblend.retrieval")
_TALKATIVE = ("sentence_transformers", "transformers", "huggingface_hub")


def is_offline() -> bool:
    """Whether the user forbids requests to the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def why_not(name: str, *, within_s: float = WITHIN_S) -> str | None:
    """Why the hub does not offer a model that is not on this machine, as the end of a sentence; None if it does.

    Requests one file, because the hub describes gated models to all but withholds their files, and loading from an unreachable
    hub retries for over a minute. Returns within `within_s` seconds, name resolution and all addresses of the hub included.
    """
    if is_offline():
        return "is not here and HF_HUB_OFFLINE is set"
    answers = [f"is not here and the hub is out of reach (no answer within {within_s:.0f} s)"]

    def ask() -> None:
        answers.append(_answer(name, within_s))

    # A daemon: a hub that hangs must not keep the process alive.
    request = Thread(target=ask, daemon=True)
    request.start()
    request.join(within_s)
    return answers[-1] or None


def _answer(name: str, timeout_s: float) -> str:
    """What `why_not` returns, or "" if the hub offers the model."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=timeout_s)
    except GatedRepoError:
        return "is gated: accept its terms on the hub and log in (`hf auth login`)"
    except EntryNotFoundError:
        return ""  # the model exists; loading it reports missing files
    except (RepositoryNotFoundError, HFValidationError):
        return "is neither a folder here nor on the model hub"
    except Exception as error:
        return f"is not here and the hub is out of reach ({_reason(error)})"
    return ""


def load_model(kind: str, what: str, location: str, device: str, remedy: str) -> Any:
    """A model of the class `kind` of sentence-transformers. The hub is asked before anything heavy is imported.

    what: as an error calls it. location: its folder or its id on the hub. remedy: the end of an error.
    Raises `EmbeddingError` if it cannot be loaded: `ModelMissingError` if it is neither here nor on the hub.
    """
    from huggingface_hub.constants import ENDPOINT

    called = f"the {what} {location}"
    is_folder = Path(location).is_dir()
    if Path(location).exists() and not is_folder:
        raise EmbeddingError(f"{called} is a file; name its folder")
    if is_folder or _is_cached(location):
        try:
            return _loaded(kind, location, device, local_files_only=True)
        except Exception as error:  # sentence-transformers passes on any error of its parts
            if is_folder:
                raise EmbeddingError(f"the folder {location} holds no {what} ({_reason(error)})") from error
    if not is_offline():
        LOG.warning(f"{called} is not on this machine: fetching it from {ENDPOINT}")
    if reason := why_not(location):
        raise ModelMissingError(f"{called} {reason}; {remedy}")
    try:
        return _loaded(kind, location, device)
    except Exception as error:
        raise EmbeddingError(f"{called} cannot be loaded ({_reason(error)}); {remedy}") from error


def _is_cached(hub_id: str) -> bool:
    """Whether the hub's cache has at least the model's configuration."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(hub_id, "config.json"), str)
    except HFValidationError:
        return False


def _loaded(kind: str, location: str, device: str, **options: Any) -> Any:
    import sentence_transformers

    model = getattr(sentence_transformers, kind)
    with LOADING, _quiet():
        return model(location, device=device, **options)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress progress bars and log lines while a model is loaded, then restore them."""
    from transformers.utils import logging as chatter

    loggers = map(logging.getLogger, _TALKATIVE)
    levels = {logger: logger.level for logger in loggers}
    bars = chatter.is_progress_bar_enabled()
    try:
        chatter.disable_progress_bar()
        for logger in levels:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        if bars:
            chatter.enable_progress_bar()
        for logger, level in levels.items():
            logger.setLevel(level)


def _reason(error: Exception) -> str:
    """The first line of an error's message, or its type if there is none."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:120]

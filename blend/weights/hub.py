"""Models of the hub: which are on this machine, and the question to the hub before anything is loaded from it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TypeVar

from blend.errors import ConfigError
from blend.weights.files import checkpoint_files
from blend_retrieval.hub import why_not

BRIEFLY_S = 2.0  # where there is another way
_REMEDY = "pass a model directory, a reachable HuggingFace id, or a catalog name (`blend models`)"
_Found = TypeVar("_Found")


def is_cached(name: str) -> bool:
    """Whether a model of this id was fetched from the hub before, with all of its weights."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    def find(file: str) -> Path | None:
        found = try_to_load_from_cache(name, file)
        return Path(found) if isinstance(found, str) else None

    try:
        return find("config.json") is not None and checkpoint_files(find) is not None
    except HFValidationError:
        return False


def require_on_hub(name: str) -> None:
    """Raise `ConfigError` for a model that the hub does not have, does not give, or a hub that is out of reach."""
    if reason := why_not(name):
        raise ConfigError(f"the model {name!r} {reason}; {_REMEDY}")


def answers_for(name: str, within_s: float = BRIEFLY_S) -> bool:
    """Whether the hub would give this model, said within so many seconds; looking up its address counts too."""
    found: list[bool] = []
    # One that hangs must not keep the process from ending.
    asking = Thread(target=lambda: found.append(why_not(name) is None), daemon=True)
    asking.start()
    asking.join(within_s)
    return any(found)


def here_or_from_hub(location: str, load: Callable[..., _Found]) -> _Found:
    """What is on this machine, without a question to the hub; for the rest, after one short question whether it answers.

    load: given to arguments of `from_pretrained`. Raises `ConfigError` where the hub does not give it, and what `load` raises.
    """
    if Path(location).is_dir():
        return load()
    with suppress(OSError, ValueError):
        return load(local_files_only=True)
    require_on_hub(location)
    return load()

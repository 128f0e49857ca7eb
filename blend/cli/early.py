"""What can be found wrong in a second, before torch is imported, weights are fetched and models are loaded."""

from __future__ import annotations

import os
from pathlib import Path

from blend.errors import ConfigError, StoreError
from blend.weights import CATALOG, resolve_model

HUB_TIMEOUT = 10.0  # seconds
_REMEDY = "pass a model directory, a reachable HuggingFace id, or a catalog name (`blend models`)"


def check_store(store: Path) -> None:
    """Raise `StoreError` when the store's place cannot be reached, or something that is no directory stands there."""
    try:
        in_the_way = store.exists() and not store.is_dir()
    except OSError as error:  # a folder above it that may not be entered
        raise StoreError(
            f"the store {store} cannot be reached ({error.strerror}): choose another one with --store"
        ) from error
    if in_the_way:
        raise StoreError(f"{store} is a file, a store is a directory: choose another one with --store")


def check_model(name: str) -> None:
    """Raise `ConfigError` or `WeightsError` for a model that cannot be there.

    A hub that is out of reach is asked once and briefly; loading from it would retry for a minute.
    """
    if name in CATALOG and not Path(name).is_dir():
        return
    location = resolve_model(name)
    if isinstance(location, Path):
        if not (location / "config.json").is_file():
            raise ConfigError(f"{location} holds no model: it has no config.json; {_REMEDY}")
    elif not _is_cached(location):
        _ask_hub(location)


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def _ask_hub(name: str) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        raise ConfigError(f"the model {name!r} is not here and HF_HUB_OFFLINE is set; {_REMEDY}")
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT)
    except GatedRepoError:
        raise ConfigError(
            f"the model {name!r} is gated: accept its terms on the hub and log in (`hf auth login`)"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ConfigError(f"no model {name!r} on the model hub, and no such directory; {_REMEDY}") from None
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        raise ConfigError(
            f"the model {name!r} is not here and the hub is out of reach ({reason}); {_REMEDY}"
        ) from error

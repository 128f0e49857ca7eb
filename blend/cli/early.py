"""What can be found wrong in a second, before torch is imported, weights are fetched and models are loaded."""

from __future__ import annotations

from pathlib import Path

from blend.errors import ConfigError, StoreError
from blend.weights import CATALOG, resolve_model
from blend.weights.catalog import is_cached, require_on_hub


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
            raise ConfigError(f"{location} holds no model: it has no config.json; name another one")
    elif not is_cached(location):
        require_on_hub(location)

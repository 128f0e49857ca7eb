"""Opens stores, corpora and models from parsed options. Cheap checks come first, before any model is loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from blend.cli.console import fetch_progress, note, warnings_as_notes
from blend.config import DEFAULT_MODEL, BlendConfig, CorpusConfig, PromptConfig
from blend.corpora import Sharing, corpora, index_dir, require_corpus
from blend.errors import ConfigError, StoreError, StoreUnreachableError
from blend.store import open_store, read_precomputed, read_store_key, read_words
from blend.store.addresses import root_of
from blend.weights import CATALOG, lasting_name, resolve_model
from blend.weights.catalog import is_cached, require_on_hub
from blend_retrieval import ChunkIndex, RetrievalError, load_embedder

if TYPE_CHECKING:
    from blend.rag import Rag

_Config = TypeVar("_Config", BlendConfig, CorpusConfig, PromptConfig)


def _check_store(store: Path) -> None:
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
        try:
            require_on_hub(location)
        except ConfigError as error:
            near = get_close_matches(name, CATALOG, n=1)
            raise ConfigError(f"{error}; did you mean {near[0]!r}?" if near else str(error)) from None


def corpus_config(options: dict[str, Any]) -> CorpusConfig:
    """How documents become chunks, from parsed options. Raises `ConfigError`."""
    return _pick(CorpusConfig, options)


def check(options: dict[str, Any], *, needs_corpus: bool = False) -> None:
    """Check options and store, and with `needs_corpus` that the corpus is there; loads nothing.

    Raises `ConfigError`, `StoreError` or, where nothing was precomputed, `RetrievalError`.
    """
    _pick(BlendConfig, options)
    _pick(CorpusConfig, options)
    _check_store(options["store"])
    fetch_indexes(options)
    if needs_corpus:
        require_corpus(options["store"], options["name"] or "")
        if not corpora(options["store"]):
            ChunkIndex.load(index_dir(options["store"], ""))  # raises `IndexMissingError`


def fetch_indexes(options: dict[str, Any]) -> None:
    """Fetch the indexes that others have published to a shared store. Raises `StoreError`."""
    if root_of(options["store"]) is None:
        return
    with warnings.catch_warnings(action="ignore"):  # `open_rag` shows them
        key = options.get("store_key") and read_store_key(options["store_key"])
    Sharing(options["store"], lambda: open_store(options["store"] / "kv", key=key)).refresh(now=True)


def open_rag(options: dict[str, Any], *, needs_index: bool = True) -> Rag:
    """A `Rag` from parsed options that passed `check`; unknown ones are ignored. Loads no model but a named embedder.

    Its embedder is the one that made the index, unless another was named. Raises `RetrievalError` for an embedder that cannot
    be loaded, and for a damaged index if `needs_index`.
    """
    key = store_key(options)
    model = model_of(options)
    check_model(model)
    named = options.get("embedder")
    embedder = load_embedder(named) if named else None  # first: a hub that does not offer it ends the command soon
    note(f"Loading {model} ...")
    from blend.rag import Rag
    from blend.store.pool import ChunkPool

    _note_other_caches(options, model)
    budget, memory, on_gpu = (options.get(name) for name in ("store_budget", "memory_budget", "gpu_budget"))
    gpu_budget = None if on_gpu is None else round(on_gpu * 1e9)
    rag = Rag(
        options["store"],
        model=model,
        device=options["device"],
        dtype=options["dtype"],
        weights=options.get("weights") or "native",
        device_path=options.get("device_path") or "auto",
        blend=_pick(BlendConfig, options),
        prompt=_pick(PromptConfig, options),
        corpus=_pick(CorpusConfig, options),
        budget_bytes=int(budget * 1e9) if budget is not None else None,
        store_key=key,
        on_fetch=fetch_progress(),
        embedder=embedder,
        memory=ChunkPool(round(memory * 1e9), gpu_budget) if memory else None,
    )
    if embedder is None:
        usual = rag.corpus_config.embedder
        with suppress(*(() if needs_index else (RetrievalError,))):
            rag.take_embedder_of_index()
        if rag.corpus_config.embedder != usual:
            note(f"Embedding with {rag.corpus_config.embedder}, which made the index; --embedder names another")
    return rag


def model_of(options: dict[str, Any]) -> str:
    """The model that --model names, else the one that made the store's caches, else the default.

    Raises `ConfigError` if several models made them, or the one that did is not here.
    """
    if options["model"]:
        return str(options["model"])
    store = options["store"]
    corpus = (options["name"] or "") if "name" in options else None
    described = _words(store, lambda kv: read_precomputed(kv, corpus))
    names = sorted({words["model"] for words in described if "model" in words})
    if len(names) > 1:
        raise ConfigError(f"the caches of {store} were made with {', '.join(names)}: name one of these with --model")
    if names and Path(names[0]).is_absolute() and not Path(names[0]).is_dir():
        raise ConfigError(f"{store} was made with {names[0]}, which is not here: say where it lies with --model")
    if names:
        note(f"Taking {names[0]}, which made the caches of {store}; --model names another")
    elif described:
        note(f"{store} does not say which model made its caches: taking {DEFAULT_MODEL}; --model names another")
    return names[0] if names else DEFAULT_MODEL


def _note_other_caches(options: dict[str, Any], model: str) -> None:
    """Note that the store's caches are of another model, before anything is computed."""
    described = _words(options["store"], lambda kv: list(read_words(kv).values()))
    models = {words["model"] for words in described if "model" in words}
    if models and lasting_name(model) not in models:
        note(
            f"{options['store']} was made with {', '.join(sorted(models))}: caches of {model} are computed anew where needed"
        )


def note_other_dtypes(rag: Rag) -> None:
    """Note that the store's caches of the loaded model are of other dtypes, before they are computed anew."""
    with suppress(StoreError):  # it is raised where caches are needed
        described = [words for words in rag.store.namespaces().values() if words.get("model") == rag.model]
        dtypes = {words["dtype"] for words in described if "dtype" in words}
        if dtypes and rag.decoder.kept_as not in dtypes:
            note(
                f"the store's caches of {rag.model} are in {', '.join(sorted(dtypes))}, which this run in "
                f"{rag.decoder.kept_as} does not use: caches are computed anew where needed; --dtype names the old ones"
            )


def note_unchecked(rag: Rag) -> None:
    """Note that the loaded model failed `blend verify`, or, once on a machine, that it was never checked.

    The catalog's models have their figures in the documentation.
    """
    if rag.model in CATALOG:
        return
    from blend.checked import first_warning

    if line := first_warning(rag.decoder):
        note(line)


def note_no_estimates(rag: Rag) -> None:
    """Note that a quality is asked for, and the store has no estimates for the corpus."""
    from blend.quality import Quality

    quality = Quality.of(rag.blend_config)
    if not quality.asked:
        return
    with suppress(StoreError):
        library = rag.blender.library(rag.template.prefix)
        if rag.blender.estimators.target(library, quality) is None:
            note("no quality is promised: the store has no estimates; `blend precompute --questions` makes them")


def _words(store: Path, read: Callable[[Path], list[dict[str, str]]]) -> list[dict[str, str]]:
    """The descriptions of a store's namespaces; none if there is no store yet or a shared one does not answer."""
    if root_of(store) is None and not (store / "kv").is_dir():
        return []
    with suppress(StoreUnreachableError):
        return read(store / "kv")
    return []


def store_key(options: dict[str, Any]) -> bytes | None:
    """The key that entries are sealed with, out of the file that --store-key names; None without one."""
    with warnings_as_notes():
        return options.get("store_key") and read_store_key(options["store_key"])


def _pick(kind: type[_Config], options: dict[str, Any]) -> _Config:
    names = [field.name for field in fields(kind) if options.get(field.name) is not None]
    return kind(**{name: options[name] for name in names})

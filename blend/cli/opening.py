"""Opens stores, corpora and models from parsed options. Cheap checks come first, before any model is loaded."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from blend.cli.console import note, warnings_as_notes
from blend.cli.progress import fetch_progress
from blend.config import DEFAULT_MODEL, BlendConfig, CorpusConfig, PromptConfig
from blend.corpora import Sharing, corpora, index_dir, indexes_named, require_corpus
from blend.errors import ConfigError, StoreError, StoreUnreachableError
from blend.model.engines import TRANSFORMERS, read_engine_options
from blend.store import open_store, read_precomputed, read_store_key
from blend.store.addresses import root_of, store_name
from blend.store.admin import note_of
from blend.store.backend import SOURCES
from blend.types import CacheKind
from blend.weights import CATALOG, resolve_model
from blend.weights.catalog import is_cached, require_on_hub
from blend_retrieval import ChunkIndex, RetrievalError, load_embedder
from blend_retrieval.embedders import BY_WORDS

if TYPE_CHECKING:
    from blend.rag import Rag

_Config = TypeVar("_Config", BlendConfig, CorpusConfig, PromptConfig)


def check_model(name: str, engine: str = TRANSFORMERS) -> None:
    """Raise `ConfigError` or `WeightsError` for a model that cannot be there.

    A hub that is out of reach is asked once and briefly; loading from it would retry for a minute.
    """
    if engine == "llamacpp":
        if not Path(name).expanduser().is_file():
            raise ConfigError(f"--engine llamacpp takes a GGUF file as --model, and {name} is no file")
        return
    if Path(name).suffix == ".gguf" and Path(name).is_file():
        raise ConfigError(f"{name} is a GGUF file: add --engine llamacpp")
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


def check(options: dict[str, Any], *, needs_corpus: bool = False) -> None:
    """Check options and store, and with `needs_corpus` that the corpus is there; loads nothing.

    Raises `ConfigError`, `StoreError` or, where nothing was precomputed, `RetrievalError`.
    """
    _pick(BlendConfig, options)
    _pick(CorpusConfig, options)
    _check_engine(options)
    store = options["store"]
    if store.exists() and not store.is_dir():
        raise StoreError(f"{store} is a file, a store is a directory: choose another one with --store")
    fetch_indexes(store, options.get("store_key"))
    if needs_corpus:
        require_corpus(store, options["name"] or "")
        if not corpora(store):
            with indexes_named(store):
                ChunkIndex.load(index_dir(store, ""))  # raises `IndexMissingError`


def _check_engine(options: dict[str, Any]) -> None:
    """Raise `ConfigError` for options of an engine that do not go together."""
    if options["engine"] == TRANSFORMERS and options["engine_options"]:
        raise ConfigError("--engine-options goes with --engine llamacpp or vllm")
    if options["engine"] == "vllm" and "share" not in options:
        raise ConfigError("--engine vllm goes with `blend precompute`; see docs/vllm.md for serving")
    read_engine_options(options["engine_options"])


def fetch_indexes(store: Path, key_file: Path | None) -> None:
    """Fetch the indexes that others have published to a shared store. Raises `StoreError`."""
    if root_of(store) is None:
        return
    with warnings.catch_warnings(action="ignore"):  # `open_rag` shows them
        key = read_store_key(key_file) if key_file else None
    Sharing(store, lambda: open_store(store / "kv", key=key)).refresh(now=True)


def open_rag(options: dict[str, Any], *, needs_index: bool = True) -> Rag:
    """A `Rag` from parsed options that passed `check`; unknown ones are ignored. Loads no model but a named embedder.

    Its embedder is the one that made the index, unless another was named. Raises `RetrievalError` for an embedder that cannot
    be loaded, and for a damaged index if `needs_index`.
    """
    key = store_key(options.get("store_key"))
    model = model_of(options)
    engine = options["engine"]
    check_model(model, engine)
    named = options.get("embedder")
    embedder = load_embedder(named) if named else None  # first: a hub that does not offer it ends the command soon
    note(f"Loading {model} ...")
    with _without_collections():
        from blend.rag import Rag
        from blend.store.pool import ChunkPool

    memory = options.get("memory_budget")
    rag = Rag(
        options["store"],
        model=model,
        device=options["device"],
        dtype=options["dtype"],
        weights=options["weights"],
        device_path=options["device_path"],
        engine=TRANSFORMERS if engine == "vllm" else engine,  # `blend precompute` brings vLLM's decoder
        engine_options=read_engine_options(options["engine_options"]),
        blend=_pick(BlendConfig, options),
        prompt=_pick(PromptConfig, options),
        corpus=_pick(CorpusConfig, options),
        budget_bytes=_bytes(options.get("store_budget")),
        store_key=key,
        on_fetch=fetch_progress(),
        embedder=embedder,
        memory=ChunkPool(round(memory * 1e9), _bytes(options.get("gpu_budget"))) if memory else None,
    )
    if embedder is None:
        usual = rag.corpus_config.embedder
        with suppress(*(() if needs_index else (RetrievalError,))):
            rag.take_embedder_of_index()
        if rag.corpus_config.embedder == BY_WORDS:
            note(
                f"Passages are found by their words alone, as the index was made; precompute with --embedder {usual} for more"
            )
        elif rag.corpus_config.embedder != usual:
            note(f"Embedding with {rag.corpus_config.embedder}, which made the index; --embedder names another")
    return rag


@contextmanager
def _without_collections() -> Iterator[None]:
    """Imports libraries sooner: garbage collection does not look through their 400,000 objects, all of which stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # moves all of them to the oldest generation
        gc.enable()


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else round(gigabytes * 1e9)


def model_of(options: dict[str, Any]) -> str:
    """The model that --model names, else the one that made the store's caches, else the default.

    Raises `ConfigError` if several models made them, or the one that did is not here.
    """
    if options["model"]:
        return str(options["model"])
    store = options["store"]
    described: list[dict[str, str]] = []
    if root_of(store) is not None or (store / "kv").is_dir():
        with suppress(StoreUnreachableError):
            # A server has no option --corpus: any corpus tells its model.
            described = read_precomputed(store / "kv", (options["name"] or "") if "name" in options else None)
    names = sorted({words["model"] for words in described if "model" in words})
    if len(names) > 1:
        raise ConfigError(
            f"the caches of {store_name(store)} were made with {', '.join(names)}: name one of these with --model"
        )
    if not names:
        return DEFAULT_MODEL
    if Path(names[0]).is_absolute() and not Path(names[0]).exists():
        raise ConfigError(
            f"{store_name(store)} was made with {names[0]}, which is not here: say where it lies with --model"
        )
    note(f"Taking {names[0]}, which made the caches of {store_name(store)}; --model names another")
    return names[0]


def note_caveats(rag: Rag) -> None:
    """Load the model, and note what is known against it: the store's caches do not fit it, or it was never checked.

    The catalog's models have their figures in the documentation.
    """
    decoder = rag.decoder
    with suppress(StoreError):  # it is raised where caches are needed
        described = rag.store.namespaces().values()
        kinds = {(words["model"], words["dtype"]) for words in described if {"model", "dtype"} <= words.keys()}
        if kinds and (rag.model, decoder.kept_as) not in kinds:
            made_with = ", ".join(f"{model} in {dtype}" for model, dtype in sorted(kinds))
            note(
                f"{store_name(rag.root)} was made with {made_with}: caches of {rag.model} in {decoder.kept_as} are computed "
                "anew where needed; --model and --dtype name others"
            )
        elif line := misfit(rag):
            note(line)
    from blend.verified import first_warning

    if rag.model not in CATALOG and (line := first_warning(decoder)):
        note(line)


def misfit(rag: Rag) -> str:
    """Why no cache of the corpus fits, though the model's name and dtype are the same; empty if they fit, or there are none.

    Raises `StoreError`.
    """
    library = rag.blender.library(rag.template.prefix)
    notes = [note_of(name) for name in rag.store.backend.names(SOURCES)]
    namespaces = {namespace for corpus, namespace in notes if corpus == rag.corpus_config.name}
    described = rag.store.namespaces()
    now = library.words(CacheKind.ISOLATED)
    before = [described[name] for name in sorted(namespaces) if described.get(name, {}).get("model") == now["model"]]
    before = [words for words in before if words.get("dtype") == now["dtype"]]
    if not before or library.isolated.identity.namespace in namespaces:
        return ""
    made_for = next((words for words in before if words.get("weights") == now["weights"]), before[-1])
    weights = f"other weights of {now['model']}, or another --weights"
    prefix = f"another prompt prefix ({made_for.get('prefix_tokens')} tokens, now {now['prefix_tokens']})"
    if "weights" not in made_for:  # earlier versions did not say
        reason = f"{weights}, or {prefix}"
    elif made_for["weights"] == now["weights"]:
        reason = f"{prefix}: the chat template or the system text is another one"
    else:
        reason = weights
    return (
        f"no cache of {store_name(rag.root)} fits, they are of {reason}; chunks are computed where needed, "
        "`blend precompute` with the corpus's documents computes all"
    )


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


def store_key(file: Path | None) -> bytes | None:
    """The key that entries are sealed with, out of this file; None without one."""
    with warnings_as_notes():
        return read_store_key(file) if file else None


def _pick(kind: type[_Config], options: dict[str, Any]) -> _Config:
    names = [field.name for field in fields(kind) if options.get(field.name) is not None]
    return kind(**{name: options[name] for name in names})

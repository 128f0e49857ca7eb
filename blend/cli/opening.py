"""What commands work on, opened from their parsed options."""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from blend.config import BlendConfig, CorpusConfig
from blend.corpora import index_dir, require_corpus
from blend.store.replica import root_of

if TYPE_CHECKING:
    from blend.rag import Rag
    from blend.store.hot_memory import HotMemory


def corpus_config(options: dict[str, Any]) -> CorpusConfig:
    """How documents become chunks, from parsed options. Raises `ConfigError`."""
    config: CorpusConfig = _pick(CorpusConfig, options)
    return config


def check(options: dict[str, Any]) -> None:
    """Raise `ConfigError` or `StoreError` for what is wrong with options and store at first sight."""
    from blend.cli.early import check_store

    _pick(BlendConfig, options)
    _pick(CorpusConfig, options)
    check_store(options["store"])
    fetch_indexes(options)


def fetch_indexes(options: dict[str, Any]) -> None:
    """Of a store elsewhere, what others have published. Raises `StoreError`."""
    if root_of(options["store"]) is None:
        return
    from blend.sharing import Sharing
    from blend.store import open_store

    with warnings.catch_warnings(action="ignore"):  # `open_rag` tells them
        key = store_key(options)
    Sharing(options["store"], lambda: open_store(options["store"] / "kv", key=key)).refresh(now=True)


def open_rag(options: dict[str, Any]) -> Rag:
    """A `Rag` from parsed options; entries that it does not know are left alone. Loads no model."""
    from blend.cli.console import note, show_fetch
    from blend.cli.early import check_model

    check(options)
    key = store_key(options)
    check_model(options["model"])
    note(f"Loading {options['model']} ...")
    from blend.rag import Rag

    budget, memory = options.get("store_budget"), options.get("memory_budget")
    return Rag(
        options["store"],
        model=options["model"],
        device=options["device"],
        dtype=options["dtype"],
        blend=_pick(BlendConfig, options),
        corpus=_pick(CorpusConfig, options),
        budget_bytes=int(budget * 1e9) if budget is not None else None,
        store_key=key,
        on_fetch=show_fetch,
        memory=_hot_memory(memory),
    )


def _hot_memory(gigabytes: float | None) -> HotMemory | None:
    """Room in memory for the hottest chunk caches."""
    if not gigabytes:
        return None
    from blend.store.hot_memory import HotMemory

    return HotMemory(round(gigabytes * 1e9))


def open_corpus(options: dict[str, Any]) -> Rag:
    """`open_rag` for a corpus that must be there, with the embedder that made its index unless another one was named."""
    from retrieval import ChunkIndex

    check(options)
    name = options["name"] or ""
    require_corpus(options["store"], name)
    index = ChunkIndex.load(index_dir(options["store"], name))
    return open_rag({**options, "embedder": options.get("embedder") or index.embedder})


def open_all_corpora(options: dict[str, Any]) -> Rag:
    """`open_rag` for the corpus without a name, there or not yet; it knows the others."""
    check(options)
    rag = open_rag(options)
    if not options.get("embedder"):
        rag.take_embedder_of_index()
    return rag


def open_for_questions(options: dict[str, Any]) -> Rag:
    """`open_rag` for questions that bring their own documents; a corpus that is named must be there all the same."""
    check(options)
    if options["name"]:
        require_corpus(options["store"], options["name"])
    return open_rag(options)


def store_key(options: dict[str, Any]) -> bytes | None:
    """The key that entries are sealed with, out of the file that --store-key names; None without one."""
    from blend.cli.console import note
    from blend.store import read_store_key

    path = options.get("store_key")
    if path is None:
        return None
    with warnings.catch_warnings(record=True, action="always") as told:
        key = read_store_key(path)
    for warning in told:
        note(str(warning.message))
    return key


def _pick(kind: type[Any], options: dict[str, Any]) -> Any:
    return kind(**{f.name: options[f.name] for f in fields(kind) if options.get(f.name) is not None})

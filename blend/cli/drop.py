"""`blend drop`: delete a corpus."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from blend.cli import opening, options
from blend.cli.console import make_sure, print_json, say
from blend.corpora import corpora, in_words, require_corpus
from blend.errors import ConfigError, StoreError
from blend.store.addresses import store_name
from blend.text import counted

if TYPE_CHECKING:
    from blend.rag import Rag

_OF_A_CORPUS = ("surrogate", "correction", "quality", "fit")


@click.command("drop")
@click.option("--yes", is_flag=True, help="Do not ask first.")
@options.json_option
@options.common
def command(yes: bool, as_json: bool, **values: Any) -> None:
    """Delete a corpus: its index, its caches that no other corpus uses, its surrogate context and KV corrections.

    Without --corpus that is the one without a name. The model is loaded, because the names of caches depend on its weights.
    Caches that another model made stay until the store's budget evicts them.
    """
    opening.check(values)
    name = values["name"] or ""
    require_corpus(values["store"], name)
    if not corpora(values["store"]):
        raise ConfigError(f"the store {store_name(values['store'])} has no corpus, so there is nothing to delete")
    make_sure(f"the corpus ({in_words(name)})", sure=yes)
    dropped = drop_corpus(opening.open_rag(values))
    if as_json:
        print_json({"corpus": name, **dropped})
        return
    documents, chunks, caches = (counted(dropped[f"{noun}s"], noun) for noun in ("document", "chunk", "cache"))
    say(f"{in_words(name)}: {documents} in {chunks} deleted, with {caches}.")


def drop_corpus(rag: Rag) -> dict[str, int]:
    """Delete the corpus of `rag`, its index first, so that nothing more is retrieved. A stopped run leaves caches behind.

    Returns the numbers of what was deleted. Raises `StoreError` for what cannot be deleted, `RetrievalError` for an index that
    cannot be read.
    """
    from blend.store.admin import forget_sources

    store = rag.store
    name = rag.corpus_config.name
    chunks = rag.index.chunks
    corpus = rag.corpus()
    before = store.stats().entries
    spare = corpus.spare(tuple(dict.fromkeys(map(rag.template.chunk_ids, chunks))))
    corpus.sharing.withdraw(name)  # or other machines would bring it back
    _remove_index(rag)
    for key in spare:
        store.delete(key)
    is_last = not corpus.others
    artifacts = [
        artifact
        for artifact in store.artifacts()
        if _is_of(artifact, name) or (is_last and artifact.startswith("probe-"))
    ]
    for artifact in artifacts:
        store.delete_artifact(artifact)
    forget_sources(store, name)
    store.advance()
    return {
        "documents": len({chunk.document_id for chunk in chunks}),
        "chunks": len(chunks),
        "caches": before - store.stats().entries,
        "artifacts": len(artifacts),
    }


def _remove_index(rag: Rag) -> None:
    """Delete the index and the documents that wait to be indexed."""
    from blend.serve.documents.queue import INCOMING

    home = rag.index_dir.parent
    try:
        for folder in (rag.index_dir, home / INCOMING):
            if folder.is_dir():  # renamed first: a reader finds all of it, or nothing
                shutil.rmtree(folder.rename(home / f".{folder.name}-{os.getpid()}.tmp"))
        if rag.corpus_config.name:
            with suppress(OSError):  # it holds other files
                home.rmdir()
    except OSError as error:
        raise StoreError(f"the index in {home} cannot be deleted ({error.strerror or error}); see its rights") from None


def _is_of(artifact: str, corpus: str) -> bool:
    """Whether an artifact, of any model, is the corpus's: it is named by kind, namespace, and the corpus if it has a name."""
    kind, *names = artifact.split("-", 2)
    return kind.partition("_")[0] in _OF_A_CORPUS and "".join(names[1:]) == corpus

"""`blend drop`: delete a corpus."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from blend.cli import opening, options
from blend.cli.console import counted, make_sure, print_json, say
from blend.corpora import corpora, in_words, require_corpus
from blend.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from blend.rag import Rag
    from blend.store import ChunkStore

_OF_A_CORPUS = ("surrogate", "correction", "correction_first", "quality", "work")
_OF_ALL = ("probe",)


class Dropped(NamedTuple):
    """What was deleted."""

    corpus: str
    documents: int
    chunks: int
    caches: int
    artifacts: int


@click.command("drop")
@click.option("--yes", is_flag=True, help="Do not ask first.")
@options.json_option
@options.common
def command(yes: bool, as_json: bool, **given: Any) -> None:
    """Delete a corpus: its index, its caches that no other corpus uses, its surrogate context and KV corrections.

    Without --corpus that is the one without a name. The model is loaded, because the names of caches depend on its weights.
    Caches that another model made stay until the store's budget evicts them.
    """
    opening.check(given)
    name = given["name"] or ""
    require_corpus(given["store"], name)
    if not corpora(given["store"]):
        raise ConfigError(f"the store {given['store']} has no corpus, so there is nothing to delete")
    make_sure(f"the corpus ({in_words(name)})", sure=yes)
    done = drop_corpus(opening.open_rag(given))
    if as_json:
        print_json(done._asdict())
        return
    say(
        f"{in_words(name)}: {counted(done.documents, 'document')} in {counted(done.chunks, 'chunk')} deleted, with "
        f"{counted(done.caches, 'cache')}."
    )


def drop_corpus(rag: Rag) -> Dropped:
    """Delete the corpus of `rag`, its index first, so that nothing more is retrieved. A stopped run leaves caches behind.

    Raises `StoreError` for what cannot be deleted, `RetrievalError` for an index that cannot be read.
    """
    from blend.files import keep_value
    from blend.rag import AUDITS
    from blend.store.admin import forget_sources

    store, name, held, corpus = rag.store, rag.corpus_config.name, rag.index.chunks, rag.corpus()
    before, spare = store.stats().entries, corpus.spare(tuple(dict.fromkeys(map(rag.template.chunk_ids, held))))
    corpus.sharing.withdraw(name)  # or other machines would bring it back
    _remove_index(rag)
    for key in spare:
        store.delete(key)
    artifacts = _artifacts(store, name, last=not corpus.others)
    for one in artifacts:
        store.delete_artifact(one)
    forget_sources(store, name)
    if (rag.root / AUDITS).exists():
        keep_value(rag.root / AUDITS, name, None)
    store.advance()
    documents = {chunk.document_id for chunk in held}
    return Dropped(name, len(documents), len(held), before - store.stats().entries, len(artifacts))


def _remove_index(rag: Rag) -> None:
    """Delete the index and the documents that wait to be indexed."""
    from blend.serve.uploads import INCOMING

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


def _artifacts(store: ChunkStore, corpus: str, *, last: bool) -> list[str]:
    """Names of a corpus's artifacts, of all models: kind, namespace, and the corpus's name if it has one.

    last: include artifacts that all corpora of the store share.
    """
    found = []
    for name in store.artifacts():
        kind, *rest = name.split("-", 2)
        if (kind in _OF_A_CORPUS and "".join(rest[1:]) == corpus) or (last and kind in _OF_ALL):
            found.append(name)
    return found

"""A copy of a store that was made while the server ran answers as the store does."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from changing import until
from engines import Answer
from rooms import ask, serving, settled

from blend.serve.request import GivenDocument
from blend.serve.service import Service

PASTED = "\n\n".join(
    f"Gate {n} of the weir of Osk is opened by hand at {n + 2} by keeper {n * 7}, and closed again when bell {n * 31} rings."
    for n in range(1, 9)
)
WAITING = "The ferry of Osk leaves at nine, and costs four coins. " * 6


def copy_running(store: Path, copy: Path) -> None:
    """As docs/stores.md says: databases first, by SQLite's backup, then all other files."""
    databases = [path.relative_to(store) for path in store.rglob("*.sqlite")]
    for name in databases:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(store / name)) as source, closing(sqlite3.connect(copy / name)) as target:
            source.backup(target)
    shutil.copytree(store, copy, ignore=shutil.ignore_patterns("*.sqlite*"), dirs_exist_ok=True)


def learn_and_wait(service: Service) -> None:
    """Learn a text, and accept a document that waits on disk."""
    ask(service, f"{PASTED}\n\nWho opens the weir?")
    settled(service)
    documents = service.documents("")
    documents.close()  # nothing is indexed any more
    documents.add(texts=[GivenDocument(WAITING, "The ferry", "ferry")])


def about_the_weir(service: Service) -> Answer:
    return ask(service, f"Please read this.\n\n{PASTED}\n\nWho opens the weir?")


def test_a_copy_answers_alike(store: Path, model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "copy"
    with serving(store, model) as service:
        learn_and_wait(service)
        copy_running(store, copy)
        original = about_the_weir(service)
    shutil.rmtree(store)
    with serving(copy, model) as service:
        answer = about_the_weir(service)
        assert answer.text == original.text
        assert answer.figures.hits >= original.figures.hits > 0  # the original may have been learned meanwhile
        assert answer.figures.rows_computed < answer.figures.rows / 2
        until(lambda: "ferry" in {chunk.document_id for chunk in service.tenant("").rag().index.chunks})
        ferry = ask(service, "When does the ferry leave?", top_k=1)
        assert [source.title for source in ferry.sources] == ["The ferry"]

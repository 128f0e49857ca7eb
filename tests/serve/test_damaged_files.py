"""Small files of a store that are damaged: a server answers over what is left, or says in one line what to do."""

import logging
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from changing import Make, add, ids, page, states, until
from damages import BINARY, JSON, SQLITE, Damage
from served import Served

from blend import Rag
from blend.serve.removed import RemovedKeys
from blend.types import ChunkKey

QUESTION = [{"role": "user", "content": "How many gates does the harbour have?"}]
KEY, OTHER = ChunkKey("space", "digest"), ChunkKey("space", "other")

# Each file, and some kinds of damage. The other kinds are tried where the file is read (tests/retrieval/test_chunk_index.py,
# test_damaged_uploads.py, test_databases.py).
SOUND_TEXTS: list[tuple[str, Damage]] = [
    ("index/manifest.json", JSON["lost"]),
    ("index/index-*.faiss", BINARY["flipped"]),
]
NO_MATTER: list[tuple[str, Damage]] = [
    ("kv/generation", BINARY["text"]),
    ("kv/namespaces/*.json", JSON["nested"]),
    ("kv/sources/_*", BINARY["flipped"]),
    ("kv/artifacts/surrogate-*", BINARY["cut"]),
    ("kv/artifacts/correction-*", BINARY["zeros"]),
    ("removed.sqlite", SQLITE["zeroed second page"]),
    ("removed.sqlite", SQLITE["text"]),
]


def damaged(store: Path, files: list[tuple[str, Damage]]) -> None:
    for pattern, damage in files:
        for path in store.glob(pattern):
            damage(path)


def retrieved(served: Served) -> httpx.Response:
    return served.ask(messages=QUESTION, kvblend={"retrieve": {"top_k": 2}})


def titles(served: Served) -> list[str]:
    response = retrieved(served)
    assert response.status_code == 200, response.text
    return [source["title"] for source in response.json()["kvblend"]["sources"]]


def test_a_server_answers_over_files_that_do_not_matter(store: Path, serve: Callable[..., Served]) -> None:
    (store / "removed.sqlite").write_bytes(b"")
    RemovedKeys(store / "removed.sqlite").add([KEY])
    damaged(store, NO_MATTER)
    served = serve()
    assert titles(served) == ["The harbour", "The harbour"]
    added = served.send(
        "POST", "/v1/documents", json={"documents": [{"id": "mill", "text": "The mill grinds rye. " * 9}]}
    )
    assert added.status_code == 202
    until(lambda: served.send("GET", "/v1/documents/mill").json()["status"] == "ready")


@pytest.mark.parametrize(("pattern", "damage"), SOUND_TEXTS)
def test_an_index_whose_texts_are_sound_is_built_anew(
    store: Path, serve: Callable[..., Served], pattern: str, damage: Damage
) -> None:
    damaged(store, [(pattern, damage)])
    served = serve()
    until(lambda: retrieved(served).status_code == 200)
    assert titles(served) == ["The harbour", "The harbour"]
    assert len(served.send("GET", "/v1/documents").json()["data"]) == 8
    assert len(list((store / "index").glob("damaged-*"))) == 1


def test_an_index_whose_texts_are_damaged_is_not_served(
    store: Path, serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    """The server runs, answers other questions, and keeps uploads until the index is mended."""
    damaged(store, [("index/chunks-*.jsonl", BINARY["flipped"])])
    with caplog.at_level(logging.WARNING):
        served = serve()
        until(lambda: bool(served.state.service.documents("").problem))
    line = served.state.service.documents("").problem
    assert line.endswith("so are its texts: run `blend precompute` again, or restore a backup")
    assert retrieved(served).status_code == 503
    assert served.ask().status_code == 200
    added = served.send("POST", "/v1/documents", json={"documents": [{"id": "mill", "text": "The mill grinds rye."}]})
    assert added.status_code == 202


@pytest.mark.parametrize("kind", SQLITE)
def test_removed_keys_are_kept_in_a_new_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "removed.sqlite"
    RemovedKeys(path).add([KEY])
    SQLITE[kind](path)
    RemovedKeys(path).add([OTHER])
    RemovedKeys(path).add([OTHER])  # the damage of a page may be noticed by the first only
    stored: list[ChunkKey] = []
    for key in (KEY, OTHER):
        RemovedKeys(path).unless_removed(key, float("inf"), lambda key=key: stored.append(key))
    assert OTHER not in stored
    assert path.is_file()
    assert list(tmp_path.glob("removed.sqlite.damaged-*")) or kind in ("empty", "lost")
    RemovedKeys(path).allow([OTHER])
    RemovedKeys(path).unless_removed(OTHER, float("inf"), lambda: stored.append(OTHER))
    assert OTHER in stored


def test_documents_go_on_while_the_index_is_built_anew(rag: Rag, make: Make) -> None:
    """What is deleted meanwhile does not come back with the texts of the damaged index."""
    documents = make()
    add(documents, [page("harbour", 2), page("mill", 2)])
    documents.close()
    assert documents.delete("mill.md")
    documents.add([page("quarry", 2)])
    damaged(rag.index_dir, [("index-*.faiss", BINARY["flipped"])])
    again = make()
    assert again.wait(120)
    assert states(again) == {"harbour.md": "ready", "quarry.md": "ready"}
    assert ids(rag) == {"harbour.md", "quarry.md"}

"""One corpus at an address: precomputed by one machine, asked by others that have nothing but the address."""

import shutil
import time

import pytest
import redis
import servers
import torch
from far_stores import bucket_of

from blend import corpus as corpus_module
from blend.config import BlendConfig, CorpusConfig
from blend.corpora import Sharing
from blend.errors import ConfigError, StoreChangedError, StoreError, StoreUnreachableError
from blend.rag import Rag
from blend.store.addresses import FILE, replica_of
from blend_retrieval import RetrievalError
from tests.tiny_model import save_tiny_model

TOPICS = ("harbour", "orchard", "glacier", "library")
QUESTION = "How many gates does the harbour have?"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A model and documents."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "documents").mkdir()
    texts = []
    for number, topic in enumerate(TOPICS):
        parts = (
            f"The {topic} of town {number} has {part + 2} gates and {13 * part} visitors. " * 5 for part in range(3)
        )
        texts.append(f"# The {topic}\n\n" + "\n\n".join(parts))
        (folder / "documents" / f"{topic}.md").write_text(texts[-1], encoding="utf-8")
    return save_tiny_model(folder / "tiny", "\n".join(texts)), folder / "documents"


@pytest.fixture(params=["objects", "redis", "both", "files"])
def address(request, tmp_path, monkeypatch):
    """Where the corpus is, and the Redis in front of it."""
    if request.param == "files":
        return f"file://{tmp_path / 'mounted'}", None
    if request.param == "redis":
        return f"redis://127.0.0.1:{servers.redis_port()}/2/{tmp_path.name}", None
    hot = f"redis://127.0.0.1:{servers.redis_port()}/3" if request.param == "both" else None
    return bucket_of(monkeypatch, tmp_path), hot


@pytest.fixture
def mounted(tmp_path):
    """A corpus in a directory that machines mount."""
    return f"file://{tmp_path / 'mounted'}", None


def sharing(rag):
    """The sharing of a machine's replica."""
    return Sharing(rag.root, lambda: rag.store)


def machine(address, folder, model, **options):
    place, hot = address
    corpus = CorpusConfig(chunk_tokens=96, top_k=3, surrogate_tokens=64, **options)
    return Rag(
        place, model=str(model), device="cpu", blend=BlendConfig(ratio=0.2), corpus=corpus, cache=folder, hot=hot
    )


@pytest.fixture(scope="module")
def expected(corpus, tmp_path_factory):
    """What a machine answers that shares nothing."""
    alone = machine((tmp_path_factory.mktemp("alone") / "store", None), None, corpus[0])
    alone.precompute(corpus[1])
    return alone.answer(QUESTION, max_new_tokens=8)


def test_what_one_precomputes_every_other_hits(address, corpus, expected, tmp_path):
    model, documents = corpus
    first, second, third = (machine(address, tmp_path / name, model) for name in ("first", "second", "third"))
    assert first.precompute(documents).computed > 0
    for rag in (second, first):
        answer = rag.answer(QUESTION, max_new_tokens=8)
        assert all(answer.blend.hits)
        assert not answer.problems
        assert answer.text == expected.text
        assert torch.equal(answer.blend.logits, expected.blend.logits)
    again = third.precompute(documents)
    assert (again.computed, again.added) == (0, 0)


def test_a_running_replica_sees_what_another_machine_changes(mounted, corpus, tmp_path):
    model, documents = corpus
    changed = tmp_path / "documents"
    shutil.copytree(documents, changed)
    first, second = (machine(mounted, tmp_path / name, model, name="town") for name in ("first", "second"))
    first.precompute(changed, quick=True)
    before = {chunk.id for chunk in second.index.chunks}
    (changed / "market.md").write_text("# The market\n\nThe market of town 9 opened in 1999. It sells rye.\n" * 3)
    first.precompute(changed, quick=True)
    sharing(second).refresh(now=True)
    assert {chunk.id for chunk in second.index.chunks} > before
    assert second.root.joinpath("corpora/town/index/manifest.json").is_file()


def test_what_was_published_while_another_planned_is_not_lost(mounted, corpus, tmp_path, monkeypatch):
    model, documents = corpus
    first, second, third = (machine(mounted, tmp_path / name, model) for name in ("first", "second", "third"))
    first.precompute(documents / "harbour.md", quick=True)
    update = corpus_module.update_index

    def slow(*given):
        monkeypatch.undo()
        first.precompute(documents / "orchard.md", add=True, quick=True)
        second.refresh()  # a question has come meanwhile
        return update(*given)

    monkeypatch.setattr(corpus_module, "update_index", slow)
    with pytest.raises(StoreChangedError, match="run the same command again"):
        second.precompute(documents / "glacier.md", add=True, quick=True)
    second.refresh()
    assert second.index.chunks == first.index.chunks
    second.precompute(documents / "glacier.md", add=True, quick=True)
    assert {chunk.title for chunk in third.index.chunks} == {"The harbour", "The orchard", "The glacier"}


def test_an_index_that_was_not_published_is_not_answered_from(mounted, corpus, tmp_path, monkeypatch):
    model, documents = corpus
    rag = machine(mounted, tmp_path / "near", model)
    rag.precompute(documents / "harbour.md", quick=True)
    before = rag.index.chunks

    def fails(*given):
        raise StoreUnreachableError("the answer got lost")

    with monkeypatch.context() as patched:
        patched.setattr(rag.store.backend, "swap", fails)
        with pytest.raises(StoreUnreachableError):
            rag.precompute(documents / "orchard.md", quick=True)
    rag.refresh()
    assert rag.index.chunks == before


def test_a_corpus_that_is_withdrawn_is_gone_everywhere(mounted, corpus, tmp_path):
    model, documents = corpus
    first, second = (machine(mounted, tmp_path / name, model) for name in ("first", "second"))
    first.precompute(documents / "harbour.md", quick=True)
    assert len(second.index) > 0
    sharing(first).withdraw("")
    sharing(second).refresh(now=True)
    for rag in (first, second):
        with pytest.raises(RetrievalError, match="no index"):
            _ = rag.index
    assert not any((tmp_path / "mounted" / "indexes").rglob("*.*"))
    second.precompute(documents / "orchard.md", quick=True)
    sharing(first).refresh(now=True)
    assert len(first.index) == len(second.index) > 0


def test_what_another_machine_removed_is_stored_again(mounted, corpus, tmp_path):
    model, documents = corpus
    first, second, third = (machine(mounted, tmp_path / name, model) for name in ("first", "second", "third"))
    first.precompute(documents)
    assert first.store.backend.wait(20)  # its disk has copies: corrections were measured on them
    everything = set(first.store.keys())
    second.precompute(documents / "harbour.md")
    assert set(second.store.keys()) < everything
    first.precompute(documents)
    assert set(third.store.keys()) == everything
    assert all(third.answer(QUESTION, max_new_tokens=1).blend.hits)


def test_a_corpus_that_is_not_mounted_is_not_withdrawn(corpus, tmp_path):
    model, documents = corpus
    mount = tmp_path / "mount"
    address = f"file://{mount / 'corpus'}", None
    first, second = (machine(address, tmp_path / name, model) for name in ("first", "second"))
    first.precompute(documents)
    answers = [second.answer(QUESTION, max_new_tokens=8)]
    assert second.store.backend.wait(20)
    mount.rename(tmp_path / "elsewhere")
    mount.mkdir()
    sharing(second).refresh(now=True)
    answers.append(second.answer(QUESTION, max_new_tokens=8))
    restarted = machine(address, tmp_path / "second", model)
    answers.append(restarted.answer(QUESTION, max_new_tokens=8))
    assert len({answer.text for answer in answers}) == 1
    assert all(all(answer.blend.hits) for answer in answers)
    with pytest.raises(StoreUnreachableError, match="mount its file system again"):
        machine(address, tmp_path / "first", model).precompute(documents)
    assert list(mount.iterdir()) == []


def test_an_index_that_somebody_else_put_there_is_not_used(mounted, corpus, tmp_path):
    model, documents = corpus
    place, _ = mounted
    rag = Rag(place, model=str(model), device="cpu", cache=tmp_path / "first", store_key=b"k" * 16)
    rag.precompute(documents / "harbour.md", quick=True)
    forged = Rag(place, model=str(model), device="cpu", cache=tmp_path / "second", store_key=b"o" * 16)
    with pytest.raises(StoreError, match="another store key"):
        _ = forged.index
    for file in (tmp_path / "mounted" / "indexes" / "_").glob("chunks-*"):
        file.write_bytes(file.read_bytes().replace(b"harbour", b"hangman"))
    third = Rag(place, model=str(model), device="cpu", cache=tmp_path / "third", store_key=b"k" * 16)
    with pytest.raises(StoreError, match="not as it was written"):
        _ = third.index


def test_a_replica_stands_for_one_store(tmp_path):
    root = replica_of("s3://bucket/one/", tmp_path / "near", None)
    assert root == tmp_path / "near"
    assert (root / FILE).stat().st_mode & 0o077 == 0
    assert replica_of("s3://bucket/one", tmp_path / "near", "redis://host") == root
    with pytest.raises(ConfigError, match="stands for s3://bucket/one already"):
        replica_of("s3://bucket/two", tmp_path / "near", None)
    (tmp_path / "own" / "kv").mkdir(parents=True)
    with pytest.raises(ConfigError, match="a store of its own"):
        replica_of("s3://bucket/two", tmp_path / "own", None)


@pytest.mark.parametrize(
    "address", ["s3://", "http://host/x", "redis://host/zero", "redis://host:port/0", "redis://h/0/a*b", "file://"]
)
def test_what_is_no_address_is_refused_without_its_password(address, tmp_path):
    with pytest.raises(ConfigError, match=r"address of a store|number, that of the database") as caught:
        replica_of(address.replace("host", "me:secret@host"), tmp_path / "near", None)
    assert "secret" not in str(caught.value)
    assert not (tmp_path / "near").exists()


def test_a_redis_that_would_evict_indexes_is_refused_at_once(corpus, tmp_path):
    port = servers.redis_port("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    first = machine((f"redis://127.0.0.1:{port}/0", None), tmp_path / "first", corpus[0])
    with pytest.raises(StoreError, match=r"evicts indexes too .* allkeys-lru.*: set it to volatile-lru"):
        first.precompute(corpus[1])


def test_an_index_that_redis_evicts_is_named_where_its_policy_cannot_be_read(corpus, tmp_path):
    hidden = ("--rename-command", "INFO", "hidden", "--rename-command", "CONFIG", "settings")
    port = servers.redis_port("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru", *hidden)
    first = machine((f"redis://127.0.0.1:{port}/0", None), tmp_path / "first", corpus[0])

    def evict_all(library, missing, progress):
        with redis.Redis(port=port) as client:
            client.execute_command("settings", "SET", "maxmemory", "1")
            while client.dbsize():
                time.sleep(0.01)
            client.execute_command("settings", "SET", "maxmemory", "100mb")
        return corpus_module.compute_here(library, missing, progress)

    with pytest.raises(StoreError, match=r"evicted the index that was just written: .* volatile-lru"):
        first.precompute(corpus[1], compute=evict_all)

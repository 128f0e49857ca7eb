"""One corpus at an address: precomputed by one machine, asked by others that have nothing but the address."""

import shutil
import time

import pytest
import redis
import torch
from far_stores import bucket_of
from servers import redis_address
from towns import TOPICS, document

from blend import corpus as corpus_module
from blend.config import BlendConfig, CorpusConfig
from blend.corpora import Sharing
from blend.errors import ConfigError, StoreChangedError, StoreError, StoreUnreachableError
from blend.rag import Rag
from blend.store.addresses import FILE, replica_of
from blend_retrieval import RetrievalError
from tests.tiny_model import save_tiny_model

QUESTION = "How many gates does the harbour have?"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "documents").mkdir()
    texts = {topic: document(topic, number) for number, topic in enumerate(TOPICS[:4])}
    for topic, text in texts.items():
        (folder / "documents" / f"{topic}.md").write_text(text, encoding="utf-8")
    return save_tiny_model(folder / "tiny", "\n".join(texts.values())), folder / "documents"


@pytest.fixture
def documents(corpus):
    return corpus[1]


@pytest.fixture
def machine(corpus, tmp_path):
    """By default the corpus is in a directory that all machines mount."""
    mounted = f"file://{tmp_path / 'mounted'}"
    return lambda folder, place=mounted, **options: rag_over(place, corpus[0], cache=tmp_path / folder, **options)


def rag_over(place, model, name="", **options):
    config = CorpusConfig(name=name, chunk_tokens=96, top_k=3, surrogate_tokens=64)
    return Rag(place, model=str(model), device="cpu", blend=BlendConfig(ratio=0.2), corpus=config, **options)


def sharing(rag):
    return Sharing(rag.root, lambda: rag.store)


@pytest.fixture(scope="module")
def expected(corpus, tmp_path_factory):
    model, documents = corpus
    alone = rag_over(tmp_path_factory.mktemp("alone") / "store", model)
    alone.precompute(documents)
    return alone.answer(QUESTION, max_new_tokens=8)


@pytest.mark.parametrize("kind", ["objects", "redis", "both", "files"])
def test_what_one_precomputes_every_other_hits(machine, documents, expected, tmp_path, monkeypatch, kind):
    if kind == "files":
        options = {}
    elif kind == "redis":
        options = {"place": f"{redis_address(2)}/{tmp_path.name}"}
    else:
        options = {"place": bucket_of(monkeypatch, tmp_path), "hot": redis_address(3) if kind == "both" else None}
    first, second, third = (machine(name, **options) for name in ("first", "second", "third"))
    assert first.precompute(documents).computed > 0
    for rag in (second, first):
        answer = rag.answer(QUESTION, max_new_tokens=8)
        assert all(answer.blend.hits)
        assert not answer.problems
        assert answer.text == expected.text
        assert torch.equal(answer.blend.logits, expected.blend.logits)
    again = third.precompute(documents)
    assert (again.computed, again.added) == (0, 0)


def test_a_running_replica_sees_what_another_machine_changes(machine, documents, tmp_path):
    changed = tmp_path / "documents"
    shutil.copytree(documents, changed)
    first, second = (machine(number, name="town") for number in ("first", "second"))
    first.precompute(changed, quick=True)
    before = {chunk.id for chunk in second.index.chunks}
    (changed / "market.md").write_text("# The market\n\nThe market of town 9 opened in 1999. It sells rye.\n" * 3)
    first.precompute(changed, quick=True)
    sharing(second).refresh(now=True)
    assert {chunk.id for chunk in second.index.chunks} > before
    assert second.root.joinpath("corpora/town/index/manifest.json").is_file()


def test_what_was_published_while_another_planned_is_not_lost(machine, documents, monkeypatch):
    first, second, third = map(machine, ("first", "second", "third"))
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


def test_an_index_that_was_not_published_is_not_answered_from(machine, documents, monkeypatch):
    rag = machine("near")
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


def test_a_corpus_that_is_withdrawn_is_gone_everywhere(machine, documents, tmp_path):
    first, second = map(machine, ("first", "second"))
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


def test_what_another_machine_removed_is_stored_again(machine, documents):
    first, second, third = map(machine, ("first", "second", "third"))
    first.precompute(documents)
    assert first.store.backend.wait(20)  # its disk has copies: corrections were measured on them
    everything = set(first.store.keys())
    second.precompute(documents / "harbour.md")
    assert set(second.store.keys()) < everything
    first.precompute(documents)
    assert set(third.store.keys()) == everything
    assert all(third.answer(QUESTION, max_new_tokens=1).blend.hits)


def test_caches_that_the_far_place_lost_come_from_a_nearer_tier(machine, documents, tmp_path):
    first, other = map(machine, ("first", "other"))
    first.precompute(documents)
    first.answer(QUESTION, max_new_tokens=1)  # its disk has copies
    assert first.store.backend.wait(20)
    files = {path.name: path.read_bytes() for path in (tmp_path / "mounted" / "objects").rglob("*.safetensors")}
    copies = {path.name for path in (tmp_path / "first" / "kv" / "objects").rglob("*.safetensors")}
    assert copies
    shutil.rmtree(tmp_path / "mounted" / "objects")
    stages = []
    again = first.precompute(documents, progress=lambda stage, done, total: stages.append((stage, done, total)))
    assert again.computed == len(files) - len(copies)
    assert again.reused == len(copies)
    assert ("restore", len(files), len(files)) in stages
    restored = {path.name: path.read_bytes() for path in (tmp_path / "mounted" / "objects").rglob("*.safetensors")}
    assert {name: content for name, content in files.items() if name in copies}.items() <= restored.items()
    assert restored.keys() == files.keys()
    assert all(other.answer(QUESTION, max_new_tokens=1).blend.hits)


def test_a_corpus_that_is_not_mounted_is_not_withdrawn(machine, documents, tmp_path):
    mount = tmp_path / "mounted"
    first, second = map(machine, ("first", "second"))
    first.precompute(documents)
    answers = [second.answer(QUESTION, max_new_tokens=8)]
    assert second.store.backend.wait(20)
    mount.rename(tmp_path / "elsewhere")
    mount.mkdir()
    sharing(second).refresh(now=True)
    answers.append(second.answer(QUESTION, max_new_tokens=8))
    answers.append(machine("second").answer(QUESTION, max_new_tokens=8))
    assert len({answer.text for answer in answers}) == 1
    assert all(all(answer.blend.hits) for answer in answers)
    with pytest.raises(StoreUnreachableError, match="mount its file system again"):
        machine("first").precompute(documents)
    assert list(mount.iterdir()) == []


def test_an_index_that_somebody_else_put_there_is_not_used(machine, documents, tmp_path):
    machine("first", store_key=b"k" * 16).precompute(documents / "harbour.md", quick=True)
    with pytest.raises(StoreError, match="another store key"):
        _ = machine("second", store_key=b"o" * 16).index
    for file in (tmp_path / "mounted" / "indexes" / "_").glob("chunks-*"):
        file.write_bytes(file.read_bytes().replace(b"harbour", b"hangman"))
    with pytest.raises(StoreError, match="not as it was written"):
        _ = machine("third", store_key=b"k" * 16).index


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


EVICTING = ("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")


def test_a_redis_that_would_evict_indexes_is_refused_at_once(machine, documents):
    first = machine("first", redis_address(0, *EVICTING))
    with pytest.raises(StoreError, match=r"evicts indexes too .* allkeys-lru.*: set it to volatile-lru"):
        first.precompute(documents)


def test_an_index_that_redis_evicts_is_named_where_its_policy_cannot_be_read(machine, documents):
    address = redis_address(
        0, *EVICTING, "--rename-command", "INFO", "hidden", "--rename-command", "CONFIG", "settings"
    )

    def evict_all(library, missing, progress):
        with redis.Redis.from_url(address) as client:
            client.execute_command("settings", "SET", "maxmemory", "1")
            while client.dbsize():
                time.sleep(0.01)
            client.execute_command("settings", "SET", "maxmemory", "100mb")
        return corpus_module.compute_here(library, missing, progress)

    with pytest.raises(StoreError, match=r"evicted the index that was just written: .* volatile-lru"):
        machine("first", address).precompute(documents, compute=evict_all)

"""A pinned cache stays where it is, on every machine, until somebody lets it go."""

import pytest
from made_stores import age, cache, call, digests, key, left, made

from blend.errors import StoreError
from blend.store import open_store
from blend.store.admin import FarPins, write_sources
from blend.store.backend import pin_cache, pinned
from blend.store.disk import DiskBackend


@pytest.fixture
def shared(tmp_path):
    """A store that machines mount, with six caches of three documents."""
    store = open_store(f"file://{tmp_path / 'mounted'}")
    for number in range(6):
        store.put(key(number), cache(number))
    space = key(0).namespace
    write_sources(store, "", space, {space: {key(n).digest: f"doc{n % 3}.md" for n in range(6)}})
    return store


def near(tmp_path, name):
    """Digests of the caches on the disk of this machine."""
    return {path.stem for path in (tmp_path / name).rglob("*.safetensors")}


def test_what_is_not_found_is_named_before_anything_is_pinned(tmp_path):
    store = made(tmp_path, 3, noted=range(3))
    for command in ("pin", "unpin"):
        refused = call(tmp_path, command, "doc1", "typo.md", "other.md", key(2).digest[:9], code=2)
        assert "'typo.md', 'other.md';" in refused
        assert pinned(store.backend) == frozenset()
    assert "2 caches pinned\n" in call(tmp_path, "pin", "doc1", key(2).digest[:9])
    assert pinned(store.backend) == digests(1, 2)
    store.delete(key(2))
    assert "1 caches let go" in call(tmp_path, "unpin", key(2).digest[:8]), "of a cache that is gone, too"


def test_whoever_removes_caches_at_large_leaves_it(tmp_path):
    store = made(tmp_path, 3)
    pin_cache(store.backend, key(0).digest, on=True)
    assert "say --yes" in call(tmp_path, "clear", code=2)
    assert len(left(store)) == 3
    call(tmp_path, "clear", "--yes")
    assert left(store) == digests(0)
    assert store.prune((), key(0).namespace) == 0
    age(tmp_path)
    assert "0 caches removed" in call(tmp_path, "prune", "--older-than", "0")
    pin_cache(store.backend, key(0).digest, on=False)
    assert store.prune((), key(0).namespace) == 1


@pytest.mark.parametrize("hot", [(), ("--store-hot", "redis://127.0.0.1:1/0")], ids=["", "Redis is down"])
def test_it_is_on_this_machines_disk_when_the_command_ends(tmp_path, shared, hot):
    place, options = f"file://{tmp_path / 'mounted'}", ("--store-cache", tmp_path / "here", *hot)
    done = call(place, "pin", "doc0.md", "doc1.md", *options)
    assert "4 caches pinned, 4 of them on this machine's disk" in done
    assert near(tmp_path, "here") == digests(0, 1, 3, 4) == pinned(shared.backend)
    call(place, "unpin", "doc0.md", "doc1.md", *options)
    assert pinned(shared.backend) == frozenset()


def test_another_machines_disk_evicts_the_others(tmp_path, shared):
    place = f"file://{tmp_path / 'mounted'}"
    nbytes = shared.stats().nbytes // 6
    pin_cache(shared.backend, key(0).digest, on=True)
    other = open_store(place, cache=tmp_path / "there", budget_bytes=int(2.5 * nbytes))
    for number in range(6):
        with other.open(key(number)) as reader:
            for layer in range(reader.layers):
                reader.layer(layer)
        assert other.backend.wait(30)
    assert key(0).digest in near(tmp_path, "there")
    assert len(near(tmp_path, "there")) == 3, "what is pinned does not count"


def down(prefix):
    raise StoreError("it is down")


def test_pins_are_remembered_while_their_place_is_down(tmp_path, monkeypatch):
    far, near = DiskBackend(tmp_path / "far"), DiskBackend(tmp_path / "near")
    pin_cache(far, key(0).digest, on=True)
    pin_cache(far, key(1).digest, on=True)
    pin_cache(near, key(2).digest, on=True)
    monkeypatch.setattr("blend.store.admin.EVERY_S", 0.0)
    pins = FarPins(far, near)
    assert pins() == digests(0, 1) == pinned(near)
    with monkeypatch.context() as patch:
        patch.setattr(far, "names", down)
        assert pins() == digests(0, 1)
        assert FarPins(far, near)() == digests(0, 1), "another process, from what the disk noted"
    pin_cache(far, key(0).digest, on=False)
    assert pins() == digests(1) == pinned(near)
    assert FarPins(far, near)() == digests(1)


def test_how_often_they_are_asked_for(tmp_path):
    far, near = DiskBackend(tmp_path / "far"), DiskBackend(tmp_path / "near")
    pins = FarPins(far, near)
    assert pins() == frozenset()
    pin_cache(far, key(0).digest, on=True)
    assert pins() == frozenset()

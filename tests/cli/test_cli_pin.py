"""A pinned cache stays where it is, on every machine, until somebody lets it go."""

import pytest
from made_stores import age, cache, call, key, left, made, note

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


def on(tmp_path, name):
    return ("--store-cache", tmp_path / name)


def near(tmp_path, name):
    return {path.stem for path in (tmp_path / name).rglob("*.safetensors")}


def test_what_is_not_found_is_named_before_anything_is_pinned(tmp_path):
    store = made(tmp_path, 3)
    note(store, range(3))
    for command in ("pin", "unpin"):
        refused = call(tmp_path, command, "doc1", "typo.md", "other.md", key(2).digest[:9])
        assert refused.exit_code == 2
        assert "'typo.md', 'other.md';" in refused.output
        assert pinned(store.backend) == frozenset()
    assert "2 caches pinned\n" in call(tmp_path, "pin", "doc1", key(2).digest[:9]).output
    assert pinned(store.backend) == {key(1).digest, key(2).digest}
    store.delete(key(2))
    assert "1 caches let go" in call(tmp_path, "unpin", key(2).digest[:8]).output, "of a cache that is gone, too"


def test_whoever_removes_caches_at_large_leaves_it(tmp_path):
    store = made(tmp_path, 3)
    pin_cache(store.backend, key(0).digest, on=True)
    refused = call(tmp_path, "clear")
    assert refused.exit_code == 2
    assert "say --yes" in refused.output
    assert len(left(store)) == 3
    assert call(tmp_path, "clear", "--yes").exit_code == 0
    assert left(store) == {key(0).digest}
    assert store.prune((), key(0).namespace) == 0
    age(tmp_path)
    assert "0 caches removed" in call(tmp_path, "prune", "--older-than", "0").output
    pin_cache(store.backend, key(0).digest, on=False)
    assert store.prune((), key(0).namespace) == 1


def test_it_is_on_this_machines_disk_when_the_command_ends(tmp_path, shared):
    place = f"file://{tmp_path / 'mounted'}"
    done = call(place, "pin", "doc0.md", "doc1.md", *on(tmp_path, "here"))
    assert "4 caches pinned, 4 of them on this machine's disk" in done.output
    wanted = {key(n).digest for n in (0, 1, 3, 4)}
    assert near(tmp_path, "here") == wanted
    assert pinned(DiskBackend(tmp_path / "mounted")) == wanted


def test_a_redis_that_is_down_is_no_hindrance(tmp_path, shared):
    place = f"file://{tmp_path / 'mounted'}"
    hot = ("--store-hot", "redis://127.0.0.1:1/0")
    done = call(place, "pin", "doc0.md", *on(tmp_path, "here"), *hot)
    assert done.exit_code == 0, done.output
    assert "2 caches pinned, 2 of them on this machine's disk" in done.output
    assert call(place, "unpin", "doc0.md", *on(tmp_path, "here"), *hot).exit_code == 0
    assert pinned(DiskBackend(tmp_path / "mounted")) == frozenset()


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


class Broken:
    """A place that can be reached again."""

    def __init__(self, backend):
        self.backend, self.down = backend, False

    def names(self, prefix):
        if self.down:
            raise StoreError("it is down")
        return self.backend.names(prefix)


def test_pins_are_remembered_while_their_place_is_down(tmp_path, monkeypatch):
    far, near = Broken(DiskBackend(tmp_path / "far")), DiskBackend(tmp_path / "near")
    digests = [key(n).digest for n in range(3)]
    for digest in digests[:2]:
        pin_cache(far.backend, digest, on=True)
    pin_cache(near, digests[2], on=True)
    monkeypatch.setattr("blend.store.admin.EVERY_S", 0.0)
    pins = FarPins(far, near)
    assert pins() == set(digests[:2]) == pinned(near)
    far.down = True
    assert pins() == set(digests[:2])
    assert FarPins(far, near)() == set(digests[:2]), "another process, from what the disk noted"
    far.down = False
    pin_cache(far.backend, digests[0], on=False)
    assert pins() == {digests[1]} == pinned(near)
    assert FarPins(far, near)() == {digests[1]}


def test_how_often_they_are_asked_for(tmp_path):
    far, near = Broken(DiskBackend(tmp_path / "far")), DiskBackend(tmp_path / "near")
    pins = FarPins(far, near)
    assert pins() == frozenset()
    pin_cache(far.backend, key(0).digest, on=True)
    assert pins() == frozenset()

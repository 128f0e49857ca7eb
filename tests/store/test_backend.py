"""What a backend must do; each test runs on each one. The store over it has tests of its own."""

import time

import pytest
from far_stores import FAR, open_far
from reading import in_threads

from blend.errors import EntryDamagedError
from blend.store import open_store

CACHE = "objects/ab/cd/cdef.safetensors"
OTHER = "artifacts/map"


@pytest.fixture(params=["memory", "disk", "objects", "redis"])
def backend(request, tmp_path):
    if request.param in FAR:
        return open_far(request, tmp_path).backend.tiers["far"]
    return _near(request.param, tmp_path)


def _near(kind, tmp_path, **options):
    return open_store("memory:" if kind == "memory" else tmp_path / "store", **options).backend


def content(backend, name):
    return backend.read(name)


def cache(number):
    return f"objects/ab/{number:02d}/{number:02d}ff.safetensors"


def listed(backend, prefix="objects/"):
    return {one.name: one for one in backend.listing(prefix)}


@pytest.mark.parametrize("name", [CACHE, OTHER, "namespaces/ab.json", "generation"])
def test_a_name_holds_what_was_put_last(backend, name):
    assert backend.open(name) is None
    assert content(backend, name) is None
    backend.delete(name)
    for blobs in ([b"one ", memoryview(b"two")], [b"", b"three"]):
        backend.put(name, blobs)
        assert content(backend, name) == b"".join(blobs)
    backend.delete(name)
    assert content(backend, name) is None


@pytest.mark.parametrize("name", [CACHE, OTHER])
def test_ranges_across_what_was_put(backend, name):
    backend.put(name, [b"012", b"", b"3456", b"789"])
    blob = backend.open(name)
    assert blob.nbytes == 10
    assert b"0123456789".startswith(bytes(blob.head))
    for offset, nbytes in ((0, 1), (0, 10), (2, 3), (3, 4), (5, 5), (9, 1), (4, 0), (10, 0)):
        into = bytearray(nbytes + 2)
        blob.read(offset, memoryview(into)[1:-1])
        assert into == b"\0" + b"0123456789"[offset : offset + nbytes] + b"\0"
    blob.close()


def test_beyond_the_end_is_damage(backend):
    backend.put(CACHE, [b"0123456789"])
    blob = backend.open(CACHE)
    for offset in (8, 10, 11):
        with pytest.raises(EntryDamagedError, match="truncated"):
            blob.read(offset, memoryview(bytearray(3)))
    blob.close()
    blob.close()


def test_a_large_content_comes_back_as_it_was(backend):
    large = bytes(range(256)) * (20 << 12)  # 20 MiB: a bucket sends it in several pieces
    backend.put(CACHE, [large[:5], large[5:]])
    assert backend.read(CACHE) == large


def test_an_open_blob_stays_what_it_was_when_it_is_evicted(tmp_path):
    backend = _near("disk", tmp_path, budget_bytes=12)
    backend.put(CACHE, [b"0123456789"])
    blob, into = backend.open(CACHE), bytearray(10)
    backend.put(cache(1), [b"x" * 10])
    blob.read(0, memoryview(into))
    assert into == b"0123456789"
    blob.close()


def test_swap(backend):
    for name in (OTHER, "indexes/docs/manifest.json"):
        assert not backend.swap(name, b"1", b"0")
        assert backend.swap(name, b"1", None)
        assert not backend.swap(name, b"2", None)
        assert backend.swap(name, b"2", b"1")
        assert content(backend, name) == b"2"
    assert set(listed(backend, "indexes/")) == set(listed(backend, "indexes/docs/")) == {"indexes/docs/manifest.json"}
    assert backend.folders("indexes/") == {"docs"}


def test_swap_lets_one_of_many_win(backend):
    backend.put(OTHER, [b"start"])
    won = []

    def work(number):
        if backend.swap(OTHER, str(number).encode(), b"start"):
            won.append(number)

    in_threads(6, work)
    assert content(backend, OTHER) == str(won[0]).encode()
    assert len(won) == 1


def test_listings_by_folder_with_sizes_and_ages(backend):
    began = time.time()
    # Letters: Redis keeps one value for all keys that hold the same small number, with one idle time for them all.
    backend.put("objects/ab/cd/cdef.safetensors", [b"a"])
    backend.put("objects/ab/ce/ceff.safetensors", [b"bb"])
    backend.put("objects/ac/cd/cdef.safetensors", [b"ccc"])
    backend.put("artifacts/map", [b"dddd"])
    backend.put("namespaces/ab.json", [b"eeeee"])
    everything = listed(backend)
    assert {name: one.nbytes for name, one in everything.items()} == {
        "objects/ab/cd/cdef.safetensors": 1,
        "objects/ab/ce/ceff.safetensors": 2,
        "objects/ac/cd/cdef.safetensors": 3,
    }
    assert all(began - 3 <= one.used <= time.time() + 1 for one in everything.values()), (began, everything)
    assert set(listed(backend, "objects/ab/")) == {n for n in everything if n.startswith("objects/ab/")}
    assert set(listed(backend, "artifacts/")) == {"artifacts/map"}
    assert listed(backend, "objects/a/") == {}
    for prefix in ("objects/", "objects/ac/", "artifacts/", "namespaces/", "objects/none/"):
        names = set(backend.names(prefix))
        assert names == set(listed(backend, prefix))
    assert backend.folders("objects/") == {"ab", "ac"}

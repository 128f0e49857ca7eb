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
    return open_store("memory:" if request.param == "memory" else tmp_path).backend


@pytest.mark.parametrize("name", [CACHE, OTHER, "namespaces/ab.json", "generation"])
def test_a_name_holds_what_was_put_last(backend, name):
    assert backend.open(name) is None
    assert backend.read(name) is None
    backend.delete(name)
    for blobs in ([b"one ", memoryview(b"two")], [b"", b"three"]):
        backend.put(name, blobs)
        assert backend.read(name) == b"".join(blobs)
    backend.delete(name)
    assert backend.read(name) is None


@pytest.mark.parametrize("name", [CACHE, OTHER])
def test_ranges_across_what_was_put(backend, name):
    backend.put(name, [b"012", b"", b"3456", b"789"])
    blob = backend.open(name)
    assert blob.nbytes == 10
    assert b"0123456789".startswith(bytes(blob.head))
    for offset, nbytes in ((0, 1), (0, 10), (2, 3), (5, 5), (4, 0), (10, 0)):
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


def test_swap(backend):
    for name in (OTHER, "indexes/docs/manifest.json"):
        assert not backend.swap(name, b"1", b"0")
        assert backend.swap(name, b"1", None)
        assert not backend.swap(name, b"2", None)
        assert backend.swap(name, b"2", b"1")
        assert backend.read(name) == b"2"
    assert set(backend.names("indexes/docs/")) == {"indexes/docs/manifest.json"}
    assert backend.folders("indexes/") == {"docs"}


def test_swap_lets_one_of_many_win(backend):
    backend.put(OTHER, [b"start"])
    won = []

    def work(number):
        if backend.swap(OTHER, str(number).encode(), b"start"):
            won.append(number)

    in_threads(6, work)
    assert backend.read(OTHER) == str(won[0]).encode()
    assert len(won) == 1


def test_listings_by_folder_with_sizes_and_ages(backend):
    began = time.time()
    # Letters: Redis keeps one value for all keys that hold the same small number, with one idle time for them all.
    contents = {
        "objects/ab/cd/cdef.safetensors": b"a",
        "objects/ab/ce/ceff.safetensors": b"bb",
        "objects/ac/cd/cdef.safetensors": b"ccc",
        "artifacts/map": b"dddd",
    }
    for name, content in contents.items():
        backend.put(name, [content])
    for prefix in ("objects/", "objects/ab/", "artifacts/", "objects/none/"):
        sizes = {name: len(content) for name, content in contents.items() if name.startswith(prefix)}
        found = list(backend.listing(prefix))
        assert {one.name: one.nbytes for one in found} == sizes
        assert set(backend.names(prefix)) == set(sizes)
        assert all(began - 3 <= one.used <= time.time() + 1 for one in found), (began, found)
    assert backend.folders("objects/") == {"ab", "ac"}

"""The lock of buckets and of Redis, when answers get lost, or the owner sleeps too long."""

import threading
import time

import pytest
from far_stores import open_far
from servers import redis_address

from blend.errors import StoreError, StoreUnreachableError
from blend.store import open_store


@pytest.fixture(params=["objects", "redis"])
def backend(request, tmp_path, monkeypatch):
    monkeypatch.setattr("blend.store.lease.LEASE_S", 1.0)
    return open_far(request, tmp_path).backend.tiers["far"]


def losing(backend, monkeypatch, when):
    """The answers of swaps get lost while `when` says so; what was lost."""
    swap, lost = backend.swap, []

    def swapped(name, content, was):
        done = swap(name, content, was)
        if when(len(lost)):
            lost.append(content)
            raise StoreUnreachableError("the answer got lost")
        return done

    monkeypatch.setattr(backend, "swap", swapped)
    return lost


def waiting(backend, order):
    def write():
        with backend.writing():
            order.append("other")

    thread = threading.Thread(target=write)
    thread.start()
    return thread


def test_lost_answers_lose_no_lease(backend, monkeypatch):
    order = []
    with backend.writing():
        lost = losing(backend, monkeypatch, lambda already: already < 2)
        thread = waiting(backend, order)
        thread.join(2.0)  # longer than the lease
        assert len(lost) == 2
        order.append("mine")
    thread.join()
    assert order == ["mine", "other"]


def test_what_was_freed_is_free_though_the_answer_got_lost(backend, monkeypatch):
    with backend.writing():
        losing(backend, monkeypatch, lambda already: threading.current_thread() is threading.main_thread())
    monkeypatch.undo()
    assert backend.read("writing") == b"free"


def test_a_lease_that_is_not_renewed_ends(backend, monkeypatch):
    monkeypatch.setattr("blend.store.lease._Lease.renew_until", lambda self, end: None)
    order = []
    with backend.writing():
        waiting(backend, order).join(20)
        assert order == ["other"]


def writes(backend, content):
    """Each way to write."""
    yield lambda: backend.put("artifacts/map", [content])
    yield lambda: backend.swap("artifacts/map", content, b"other")
    yield lambda: backend.delete("artifacts/map")
    yield lambda: backend.put("objects/n/aa/aa.safetensors", [content])


def test_who_has_lost_the_lease_writes_nothing_more(backend, monkeypatch):
    monkeypatch.setattr("blend.store.lease._Lease.renew_until", lambda self, end: None)  # it sleeps

    def take_over():
        with backend.writing():
            backend.put("artifacts/map", [b"other"])

    with backend.writing():
        backend.put("artifacts/map", [b"mine"])
        successor = threading.Thread(target=take_over)
        successor.start()
        successor.join(20)
        for write in writes(backend, b"late"):
            with pytest.raises(StoreError, match=r"another process may be writing to .*: run the same command again"):
                write()
        assert backend.read("artifacts/map") == b"other"
        assert backend.read("objects/n/aa/aa.safetensors") is None
    assert backend.read("writing") == b"free"
    backend.put("artifacts/map", [b"later"])
    assert backend.read("artifacts/map") == b"later"


def test_a_sleep_costs_nothing_where_nobody_came(backend, monkeypatch):
    monkeypatch.setattr("blend.store.lease.LEASE_S", 0.05)
    monkeypatch.setattr("blend.store.lease._Lease.renew_until", lambda self, end: None)
    with backend.writing():
        time.sleep(0.1)
        backend.put("artifacts/map", [b"mine"])
    assert backend.read("artifacts/map") == b"mine"


def test_other_threads_write_whatever_becomes_of_the_lease(backend, monkeypatch):
    monkeypatch.setattr("blend.store.lease._Lease.renew_until", lambda self, end: None)
    with backend.writing():
        backend.swap("writing", b"another's", backend.read("writing"))
        threads = [threading.Thread(target=write) for write in list(writes(backend, b"other"))[:2]]
        for thread in threads:
            thread.start()
            thread.join()
    assert backend.read("artifacts/map") == b"other"
    assert backend.read("writing") == b"another's"  # who has lost it does not free it
    backend.delete("writing")


def test_a_lost_lease_of_one_store_is_none_of_another(backend, tmp_path, monkeypatch):
    monkeypatch.setattr("blend.store.lease._Lease.renew_until", lambda self, end: None)
    other = open_store(f"{backend.place}/other").backend.tiers["far"]
    with backend.writing():
        backend.swap("writing", b"another's", backend.read("writing"))
        other.put("artifacts/map", [b"mine"])
        with other.writing():
            other.put("artifacts/map", [b"still mine"])
            with pytest.raises(StoreError, match="another process may be writing"):
                backend.put("artifacts/map", [b"late"])
    assert other.read("artifacts/map") == b"still mine"
    assert backend.read("artifacts/map") is None


def test_redis_looks_and_writes_in_one_step(tmp_path, monkeypatch):
    backend = open_store(f"{redis_address(0)}/{tmp_path.name}").backend.tiers["far"]
    monkeypatch.setattr("blend.store.lease._Lease.renew_until", lambda self, end: None)
    with backend.writing():
        backend.put("artifacts/map", [b"other"])
        content = backend.read("writing")
        backend.swap("writing", b"another's", content)
        monkeypatch.setattr(backend, "read", lambda name: content)  # it looked before it slept
        for write in list(writes(backend, b"late"))[:3]:
            with pytest.raises(StoreError, match="another process may be writing"):
                write()
    monkeypatch.undo()
    assert backend.read("artifacts/map") == b"other"

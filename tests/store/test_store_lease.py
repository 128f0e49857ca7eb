"""The lock of buckets and of Redis, when answers get lost, the server is away, or the owner sleeps too long."""

import threading
import time

import pytest
from far_stores import open_far

from blend.errors import StoreError, StoreUnreachableError
from blend.store.lease import leased

LEASE_S = 1.0


@pytest.fixture(params=["objects", "redis"])
def opened(request, tmp_path):
    """The same place, as often as it is called."""
    return lambda: open_far(request, tmp_path).backend.tiers["far"]


@pytest.fixture
def backend(opened):
    return opened()


@pytest.fixture
def asleep(monkeypatch):
    """Nothing is written anew."""
    monkeypatch.setattr("blend.store.lease._Lease.renew_until", lambda self, end: None)


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


def renewed(backend, times):
    """Wait until the lease was written anew so often."""
    seen, end = {backend.read("writing", 100)}, time.monotonic() + 20
    while len(seen) <= times and time.monotonic() < end:
        seen.add(backend.read("writing", 100))
        time.sleep(0.01)
    assert len(seen) > times


def test_lost_answers_lose_no_lease(backend, monkeypatch):
    order, inside = [], threading.Event()

    def other():
        inside.wait()
        with leased(backend, lease_s=LEASE_S):
            order.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    with leased(backend, lease_s=LEASE_S):
        lost = losing(backend, monkeypatch, lambda already: already < 2)
        inside.set()
        renewed(backend, 6)  # longer than the lease
        assert len(lost) == 2
        backend.put("artifacts/map", [b"mine"])
        order.append("mine")
    thread.join()
    assert order == ["mine", "other"]


def test_what_was_freed_is_free_though_the_answer_got_lost(backend, monkeypatch):
    with leased(backend, lease_s=60):
        losing(backend, monkeypatch, lambda already: threading.current_thread() is threading.main_thread())
    monkeypatch.undo()
    assert backend.read("writing", 100) == b"free"


def test_who_has_lost_the_lease_writes_nothing_more(backend, opened, asleep):
    another = opened()
    with leased(backend, lease_s=0.2):
        with leased(another, lease_s=0.2):  # it waited for so long
            another.put("artifacts/map", [b"other"])
        assert backend.read("writing", 100) == b"free"
        for write in (
            lambda: backend.put("artifacts/map", [b"mine"]),
            lambda: backend.swap("artifacts/map", b"mine", b"other"),
            lambda: backend.delete("artifacts/map"),
        ):
            with pytest.raises(StoreError, match="another process may be writing"):
                write()
        assert backend.read("artifacts/map", 100) == b"other"
    backend.put("artifacts/map", [b"later"])


def test_an_outage_that_is_over_costs_nothing_where_nobody_came(backend, asleep):
    with leased(backend, lease_s=LEASE_S):
        time.sleep(1.1 * LEASE_S)
        backend.put("artifacts/map", [b"mine"])
    assert backend.read("artifacts/map", 100) == b"mine"


def test_other_threads_write_whatever_becomes_of_the_lease(backend, asleep):
    with leased(backend, lease_s=0.05):
        backend.swap("writing", b"another's", backend.read("writing", 100))
        time.sleep(0.1)
        thread = threading.Thread(target=lambda: backend.put("objects/ab/cd/cdef.safetensors", [b"one"]))
        thread.start()
        thread.join()
    assert backend.read("objects/ab/cd/cdef.safetensors", 100) == b"one"
    backend.delete("writing")

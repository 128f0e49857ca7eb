"""The lock of buckets and of Redis, when answers get lost, or the owner sleeps too long."""

import threading

import pytest
from far_stores import open_far

from blend.errors import StoreUnreachableError


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

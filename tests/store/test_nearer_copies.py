"""Copies in nearer tiers of what the far place lacks: they are not stored, and are removed."""

import pytest
import servers
from reading import read
from wire import Proxy

from blend.errors import EntryDamagedError, StoreUnreachableError
from blend.store import Timeouts, open_store
from blend.store.admin import remove_copies
from blend.store.backend import pin_cache


@pytest.fixture(params=["disk", "redis"])
def opened(request, tmp_path):
    """A store of two entries that its nearer tier has copies of, over a far place that a second one writes to."""

    def make(key, cache, **options):
        near = {"cache": tmp_path / "near"}
        if request.param == "redis":
            near = {"hot": f"redis://127.0.0.1:{servers.redis_port()}/6"}
        store = open_store(f"file://{tmp_path / 'far'}", **near, **options)
        for number in (1, 2):
            store.put(key(number), cache(number))
            read(store, key(number))
        assert store.backend.wait(20)
        return store, open_store(f"file://{tmp_path / 'far'}")

    return make


def test_a_copy_is_no_entry(opened, key, cache):
    store, far = opened(key, cache)
    far.delete(key(1))
    assert store.held([key(1), key(2), key(3)]) == {key(2)}
    assert key(1) not in store
    assert store.readable([key(1), key(2), key(3)]) == {key(1), key(2)}
    store.open(key(1)).close()  # an answer uses it all the same


def test_copies_of_what_is_gone_are_removed_but_for_pinned_ones(opened, key, cache, tmp_path):
    store, far = opened(key, cache)
    assert remove_copies(store.backend) == 0
    for number in (1, 2):
        far.delete(key(number))
    pin_cache(far.backend, key(2).digest, on=True)
    assert remove_copies(store.backend, dry_run=True) == 1
    assert remove_copies(store.backend) == 1
    assert store.open(key(1)) is None
    store.open(key(2)).close()


@pytest.fixture
def failing(tmp_path):
    """A store behind a Redis that can fail; its address and proxy."""
    proxy = Proxy(servers.redis_port())
    hot = f"redis://127.0.0.1:{proxy.port}/6"
    timeouts = Timeouts(answer_s=0.5, pause_s=0.01)
    yield open_store(f"file://{tmp_path / 'far'}", hot=hot, timeouts=timeouts), hot, proxy
    proxy.close()


def test_a_tier_that_missed_a_removal_is_named_and_asked_again(failing, key, cache):
    store, hot, proxy = failing
    store.put(key(1), cache(1))
    read(store, key(1))
    assert store.backend.wait(20)
    proxy.set("refused")
    store.delete(key(1))
    with pytest.raises(StoreUnreachableError, match=f"may still be in {hot}"):
        remove_copies(store.backend)
    assert remove_copies(store.backend, dry_run=True) == 0
    proxy.set("")
    assert remove_copies(store.backend) == 1
    assert store.open(key(1)) is None


def test_the_last_copy_of_what_is_gone_that_cannot_be_read_is_no_outage(failing, key, cache, tmp_path):
    store, _, proxy = failing
    store.put(key(1), cache(1, tokens=2000))  # so large that layers do not come along when it is opened
    read(store, key(1))
    assert store.backend.wait(20)
    open_store(f"file://{tmp_path / 'far'}").delete(key(1))
    with store.open(key(1)) as reader:
        proxy.set("hanging")
        with pytest.raises(EntryDamagedError):
            reader.layer(0)

"""Copies in nearer tiers of what the far place lacks: they are not stored, and are copied back or removed."""

import pytest
from reading import assert_holds, cache, flip, key, path_of, read
from servers import redis_address

from blend.errors import EntryDamagedError, StoreUnreachableError
from blend.store import Timeouts, open_store
from blend.store.admin import remove_copies
from blend.store.backend import cache_name, pin_cache


@pytest.fixture(params=["disk", "redis"])
def stores(request, tmp_path):
    """One of two entries that its nearer tier has copies of, and another one over the same far place."""
    near = {"hot": redis_address(6)} if request.param == "redis" else {"cache": tmp_path / "near"}
    store = open_store(f"file://{tmp_path / 'far'}", **near)
    for number in (1, 2):
        store.put(key(number), cache(number))
        read(store, key(number))
    assert store.backend.wait(20)
    return store, open_store(f"file://{tmp_path / 'far'}")


def test_a_copy_is_no_entry(stores):
    store, far = stores
    far.delete(key(1))
    assert store.held([key(1), key(2), key(3)]) == {key(2)}
    assert key(1) not in store
    assert store.readable([key(1), key(2), key(3)]) == {key(1), key(2)}
    store.open(key(1)).close()  # an answer uses it all the same


def test_a_lost_entry_is_copied_back(stores):
    store, far = stores
    content = far.backend.read(cache_name(key(1)))
    far.delete(key(1))
    assert [store.restore(key(number)) for number in (1, 3)] == [True, False]
    assert far.backend.read(cache_name(key(1))) == content
    assert_holds(far, key(1), cache(1))
    assert [far.restore(key(1)), far.restore(key(3))] == [False, False]  # it has no nearer tiers


def test_a_damaged_copy_is_not_copied_back_but_the_next_sound_one_is(tmp_path):
    address = f"file://{tmp_path / 'far'}"
    disk_alone = open_store(address, cache=tmp_path / "near")
    both = open_store(address, cache=tmp_path / "other", hot=redis_address(6))
    for store, number in ((disk_alone, 1), (both, 2)):
        store.put(key(number), cache(number))
        read(store, key(number))
        assert store.backend.wait(20)
        copy = path_of(open_store(store.backend.tiers["local"].root), key(number))
        flip(copy, -1)  # in its last layer
        open_store(address).delete(key(number))
        assert store.restore(key(number)) == (number == 2)
        assert not copy.exists()
    assert open_store(address).open(key(1)) is None
    assert_holds(open_store(address), key(2), cache(2))


def test_copies_of_what_is_gone_are_removed_but_for_pinned_ones(stores):
    store, far = stores
    assert remove_copies(store.backend) == 0
    for number in (1, 2):
        far.delete(key(number))
    pin_cache(far.backend, key(2).digest, on=True)
    assert remove_copies(store.backend, dry_run=True) == 1
    assert remove_copies(store.backend) == 1
    assert store.open(key(1)) is None
    store.open(key(2)).close()


@pytest.fixture
def store(failing_redis, tmp_path):
    timeouts = Timeouts(answer_s=0.5, pause_s=0.01)
    hot = f"redis://127.0.0.1:{failing_redis.port}/6"
    return open_store(f"file://{tmp_path / 'far'}", hot=hot, timeouts=timeouts)


def test_a_tier_that_missed_a_removal_is_named_and_asked_again(store, failing_redis):
    store.put(key(1), cache(1))
    read(store, key(1))
    assert store.backend.wait(20)
    failing_redis.set("refused")
    store.delete(key(1))
    with pytest.raises(StoreUnreachableError, match=rf"may still be in redis://.*:{failing_redis.port}/6"):
        remove_copies(store.backend)
    assert remove_copies(store.backend, dry_run=True) == 0
    failing_redis.set("")
    assert remove_copies(store.backend) == 1
    assert store.open(key(1)) is None


def test_the_last_copy_of_what_is_gone_that_cannot_be_read_is_no_outage(store, failing_redis, tmp_path):
    store.put(key(1), cache(1, tokens=2000))  # so large that layers do not come along when it is opened
    read(store, key(1))
    assert store.backend.wait(20)
    open_store(f"file://{tmp_path / 'far'}").delete(key(1))
    with store.open(key(1)) as reader:
        failing_redis.set("hanging")
        with pytest.raises(EntryDamagedError):
            reader.layer(0)

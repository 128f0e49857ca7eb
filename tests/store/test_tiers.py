"""Several places as one store: where entries are read from, what is fetched once, and what becomes of a tier that fails."""

import gc
import time
import weakref

import pytest
import redis
import torch
from far_stores import tell_bucket
from reading import assert_holds, cache, flip, in_threads, key, read
from servers import redis_address
from store_processes import run
from wire import FAULTS

from blend.errors import EntryDamagedError, StoreError, StoreUnreachableError
from blend.store import Timeouts, open_store
from blend.store.backend import TierHits, cache_name
from blend.store.disk import DiskBlob

QUICK = Timeouts(connect_s=1.0, answer_s=1.5, pause_s=60.0)


@pytest.fixture
def bucket(failing_bucket):
    return failing_bucket[1]


@pytest.fixture
def make(failing_bucket, failing_redis, tmp_path):
    def opened(machine="one", **options):
        given = {"cache": tmp_path / machine, "hot": f"redis://127.0.0.1:{failing_redis.port}/4", "timeouts": QUICK}
        return open_store(failing_bucket[0], **(given | options))

    return opened


def settled(store):
    assert store.backend.wait(30)
    return store.backend.tier_hits


def test_the_nearest_tier_that_has_it_and_all_of_them_afterwards(make):
    one, two = make(hot=None), make("two")
    one.put(key(1), cache(1))
    nbytes = one.stats().nbytes
    assert_holds(one, key(1), cache(1))
    assert settled(one) == TierHits(0, 0, 1, 0, nbytes)
    assert_holds(one, key(1), cache(1))
    assert settled(one) == TierHits(1, 0, 1, 0, nbytes)
    read(two, key(1))
    assert settled(two) == TierHits(0, 0, 1, 0, nbytes)
    three = make("three")
    read(three, key(1))
    assert settled(three) == TierHits(0, 1, 0, 0, nbytes)
    assert three.backend.evictions == 0
    content = [tier.read(next(tier.names("objects/"))) for tier in three.backend.tiers.values()]
    assert content[0] == content[1] == content[2]  # as they are
    assert three.open(key(2)) is None
    assert three.backend.tier_hits.missing == 1


def test_many_readers_of_one_entry_fetch_it_once(make):
    make(hot=None).put(key(1), cache(1, tokens=4000))
    store = make("two", hot=None)
    readers = [store.open(key(1)) for _ in range(2)]
    in_threads(6, lambda _: assert_holds(store, key(1), cache(1, tokens=4000)))
    for reader in readers:
        reader.close()
    assert settled(store).fetched_bytes == store.stats().nbytes


def test_after_its_first_layer_an_entry_needs_no_server(make, bucket):
    large = cache(1, tokens=4000)
    make(hot=None).put(key(1), large)
    with make(cache=None, hot=None).open(key(1)) as reader:
        reader.layer(0)
        bucket.set("refused")
        for index in range(reader.layers):
            assert torch.equal(reader.layer(index)[0], large.keys[index])


def test_looking_fetches_nothing(make):
    make(hot=None).put(key(1), cache(1))
    store = make("two", hot=None)
    assert key(1) in store
    assert store.held([key(1), key(2)]) == {key(1)}
    store.open(key(1)).close()
    assert settled(store).fetched_bytes == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_redis_that_fails_is_told_once_and_costs_little(make, failing_redis, fault, caplog):
    writer = make("one")
    for number in range(8):
        writer.put(key(number), cache(number, tokens=200))
        read(writer, key(number))
    settled(writer)
    store = make("two", cache=None)
    failing_redis.set(fault)
    for number in range(8):
        assert_holds(store, key(number), cache(number, tokens=200))
    told = [record.getMessage() for record in caplog.records if "redis" in record.getMessage()]
    assert len(told) == len(set(told)) <= 3
    assert fault in ("slow", "wrong bytes") or told


def test_a_tier_that_hangs_costs_its_timeout_once(make, failing_redis, bucket, caplog):
    make(hot=None).put(key(1), cache(1))
    store = make("two")
    failing_redis.set("hanging")
    began = time.monotonic()
    read(store, key(1))
    assert time.monotonic() - began >= QUICK.answer_s
    settled(store)
    bucket.set("hanging")
    began = time.monotonic()
    with pytest.raises(StoreUnreachableError, match="see that it is up"):
        store.open(key(2))
    assert time.monotonic() - began >= QUICK.answer_s
    began = time.monotonic()
    for number in range(2, 200):
        with pytest.raises(StoreUnreachableError):
            store.open(key(number))
        with pytest.raises(StoreError):
            store.put(key(number), cache(number))
    assert_holds(store, key(1), cache(1))  # out of the disk, all the while
    assert time.monotonic() - began < 400 * QUICK.answer_s, "some calls waited for the servers"
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("fault", "cause"),
    [("refused", "error sending request"), ("hanging", "error sending request"), ("busy", "503 Service Unavailable")],
)
def test_an_outage_of_the_bucket_is_no_miss_and_ends(make, bucket, fault, cause):
    def opened():
        return make(cache=None, hot=None, timeouts=QUICK._replace(answer_s=0.8, pause_s=0.2))

    store = opened()
    store.put(key(1), cache(1))
    if fault == "busy":
        tell_bucket(fault)
    else:
        bucket.set(fault)
    for look in (lambda: store.open(key(1)), lambda: opened().open(key(2)), lambda: list(opened().keys())):
        with pytest.raises(StoreError, match=cause) as caught:
            look()
        assert not isinstance(caught.value, EntryDamagedError)
    tell_bucket("")
    bucket.set("")
    time.sleep(0.25)  # a tier that is back is asked again
    assert_holds(store, key(1), cache(1))


def test_a_bucket_that_is_not_there_is_no_miss(failing_bucket):
    store = open_store(f"{failing_bucket[0].partition('://')[0]}://kvblend-absent/x")
    for call in (lambda: store.open(key(1)), lambda: store.generation, lambda: list(store.keys())):
        with pytest.raises(StoreError, match="create it"):
            call()


def test_a_full_redis_is_told_once_and_goes_on_being_read(tmp_path, caplog):
    hot = redis_address(0, "--maxmemory", "2mb", "--maxmemory-policy", "noeviction")
    store = open_store(f"file://{tmp_path / 'far'}", hot=hot, timeouts=QUICK)
    for number in range(30):
        store.put(key(number), cache(number, tokens=400))
        read(store, key(number))
        settled(store)
    (line,) = (record.getMessage() for record in caplog.records)
    assert "is full" in line
    assert "volatile-lru" in line
    before = store.backend.tier_hits.hot
    assert_holds(store, key(0), cache(0, tokens=400))
    assert store.backend.tier_hits.hot == before + 1


def test_what_an_artifact_was_before_it_was_damaged_and_when_the_bucket_went_away(make, bucket):
    def assert_known():
        for machine in ("one", "two"):
            assert make(machine, hot=None).read_artifact("surrogate-1") == b"tokens"
            assert make(machine, hot=None).read_artifact("surrogate-2") is None

    store = make(hot=None)
    store.write_artifact("surrogate-1", b"tokens")
    assert_known()
    far = store.backend.tiers["far"]
    far.put("artifacts/surrogate-1", [far.read("artifacts/surrogate-1")[:-1] + b"?"])
    with pytest.raises(EntryDamagedError):
        store.read_artifact("surrogate-1")
    bucket.set("refused")
    assert_known()
    for call in (lambda: make("three").read_artifact("surrogate-1"), lambda: store.write_artifact("surrogate-1", b"x")):
        with pytest.raises(StoreError):
            call()


@pytest.mark.parametrize("place", ["header", "layer"])
def test_a_damaged_copy_is_fetched_again_and_nothing_is_computed(make, place, tmp_path, caplog):
    store = make("one")
    store.put(key(1), cache(1, tokens=50))
    read(store, key(1))
    settled(store)
    (copy,) = (tmp_path / "one" / "objects").rglob("*.safetensors")
    for _ in range(2):
        flip(copy, 200 if place == "header" else -100)
        assert_holds(store, key(1), cache(1, tokens=50))
        settled(store)
    name = str(copy.relative_to(tmp_path / "one"))
    assert copy.read_bytes() == store.backend.tiers["far"].read(name)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'one'} held bytes that were never written: they are fetched again"
    ]


def test_what_redis_holds_is_believed_as_far_as_its_digests(make, tmp_path):
    sealed = make(key=b"k" * 16)
    sealed.put(key(1), cache(1))
    name = cache_name(key(1))
    plain = open_store(tmp_path / "forger", key=b"o" * 16)
    plain.put(key(1), cache(2))
    forged = plain.backend.read(name)
    sealed.backend.tiers["hot"].put(name, [forged])
    second = make("two", key=b"k" * 16)
    assert_holds(second, key(1), cache(1))
    settled(second)  # it puts what it fetched into Redis
    sealed.backend.tiers["far"].put(name, [forged])
    sealed.backend.tiers["hot"].delete(name)
    with pytest.raises(EntryDamagedError):
        read(make("three", key=b"k" * 16), key(1))


def test_what_was_changed_on_the_way_is_asked_for_again(tmp_path, monkeypatch):
    store = open_store(f"file://{tmp_path / 'far'}")
    store.put(key(1), cache(1))
    as_it_is, changed = DiskBlob.read, []

    def change(self, offset, into):
        as_it_is(self, offset, into)
        if not changed:
            into[0] ^= 1
            changed.append(offset)

    monkeypatch.setattr(DiskBlob, "read", change)
    assert_holds(store, key(1), cache(1))
    assert changed


def test_damage_of_the_far_place_alone_is_damage(tmp_path):
    store = open_store(f"file://{tmp_path / 'far'}", cache=tmp_path / "near")
    store.put(key(1), cache(1))
    (file,) = (tmp_path / "far" / "objects").rglob("*.safetensors")
    flip(file, -10)
    with store.open(key(1)) as reader, pytest.raises(EntryDamagedError, match="not what was written"):
        reader.layer(2)
    settled(store)
    assert not list(store.backend.tiers["local"].names("objects/"))


def test_a_redis_that_evicts_evicts_caches_alone(tmp_path):
    address = redis_address(0, "--maxmemory", "3mb", "--maxmemory-policy", "volatile-lru")
    store = open_store(address)
    store.write_artifact("surrogate-1", b"tokens")
    for number in range(40):
        store.put(key(number), cache(number, tokens=300))
    with redis.Redis.from_url(address) as client:
        client.config_set("maxmemory", 0)  # or what is read takes memory, and evicts what is to be read next
    assert 0 < store.stats().entries < 40
    assert store.read_artifact("surrogate-1") == b"tokens"
    for number in range(40):
        if key(number) in store:
            assert_holds(store, key(number), cache(number, tokens=300))


@pytest.mark.parametrize(("fault", "words"), [("list", "credentials"), ("read", "credentials"), ("full", "is full")])
def test_a_bucket_that_refuses_is_no_miss_and_says_so(make, bucket, fault, words):
    store = make(cache=None, hot=None)
    store.put(key(1), cache(1))
    tell_bucket(fault)
    again = make(cache=None, hot=None)
    assert list(again.keys()) == [key(1)]
    refused = [lambda: again.put(key(2), cache(2))]
    if fault == "list":
        refused.append(lambda: again.open(key(1)))
    else:
        assert_holds(again, key(1), cache(1))
    if fault != "full":
        refused.append(lambda: again.delete(key(1)))
    for call in refused:
        with pytest.raises(StoreError, match=words):
            call()
    tell_bucket("")
    assert_holds(make(cache=None, hot=None), key(1), cache(1))


def test_a_process_that_ends_leaves_what_it_fetched_in_the_nearer_tier(tmp_path):
    store = open_store(f"file://{tmp_path / 'far'}", cache=tmp_path / "near")
    store.put(key(1), cache(1))
    work = """
    from blend.store.disk import DiskBackend
    put = DiskBackend.put
    DiskBackend.put = lambda *given: time.sleep(0.3) or put(*given)
    store = open_store(f"file://{root / 'far'}", cache=root / "near")
    (only,) = store.keys()
    with store.open(only) as reader:
        reader.layer(0)
    """
    run(tmp_path, work)
    assert list(store.backend.tiers["local"].names("objects/"))


def test_a_store_that_is_dropped_closes_its_connections_at_once(tmp_path):
    address = f"{redis_address(0)}/{tmp_path.name}"
    store = open_store(address, cache=tmp_path / "near", hot=redis_address(4))
    assert store.generation == ""
    places = [weakref.ref(place) for place in store.backend.tiers.values()]
    assert len(places) == 3
    gc.disable()
    try:
        del store
        assert [place() for place in places] == [None] * 3
    finally:
        gc.enable()


def lose_everything(address):
    """As a flush of the Redis does; other tests are in the same database."""
    far = open_store(address).backend
    for name in ("artifacts/map", "generation"):
        far.delete(name)


def test_a_far_redis_that_was_flushed_is_told_once(tmp_path, caplog):
    address = f"{redis_address(0)}/{tmp_path.name}"

    def generation():
        return open_store(address, cache=tmp_path / "near").generation

    assert generation() == ""
    open_store(address).write_artifact("map", b"content")
    assert generation()
    assert not caplog.messages  # a store that never held anything has lost nothing
    lose_everything(address)
    for _ in range(2):
        assert generation() == ""
    (line,) = caplog.messages
    assert line.startswith(f"{address} has lost all that it held")
    assert "run `blend precompute` again" in line


def test_a_running_process_tells_of_it_without_a_disk(tmp_path, caplog):
    address = f"{redis_address(0)}/{tmp_path.name}"
    store = open_store(address)
    store.write_artifact("map", b"content")
    assert store.generation
    lose_everything(address)
    for _ in range(2):
        store.backend.delete("generation")  # so that it is asked for at once
        assert store.generation == ""
    (line,) = caplog.messages
    assert line.startswith(f"{address} has lost all that it held")

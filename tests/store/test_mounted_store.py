"""A store on a file system that machines mount: what becomes of its readers and writers when nothing is mounted there."""

import errno
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from reading import cache, failing, key

from blend.errors import EntryDamagedError, StoreError, StoreUnreachableError
from blend.store import Timeouts, open_store
from blend.store.addresses import replica_of

GONE = "mount its file system again"


@pytest.fixture
def mount(tmp_path):
    return tmp_path / "mount"


@pytest.fixture
def make(tmp_path, mount):
    return lambda machine="one": open_store(f"file://{mount / 'corpus'}", cache=tmp_path / machine)


def read(store, key):
    with store.open(key) as reader:
        reader.layer(0)
    assert store.backend.wait(20)


def test_looking_makes_no_store_and_the_first_write_does(make, mount):
    store = make()
    assert store.open(key(1)) is None
    assert store.held([key(1)]) == set()
    assert (store.generation, list(store.keys()), store.namespaces()) == ("", [], {})
    assert not mount.exists()
    store.put(key(1), cache(1))
    assert key(1) in make("two")
    manifest = mount / "corpus" / "store.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 2}))
    with pytest.raises(StoreError, match="upgrade kvblend"):
        make("two")


@pytest.mark.parametrize("restarted", [False, True])
def test_an_empty_mount_point_is_an_outage(make, mount, tmp_path, restarted):
    writer, store = make("writer"), make()
    for number in (1, 2):
        writer.put(key(number), cache(number))
    writer.write_artifact("surrogate-1", b"tokens")
    read(store, key(1))
    assert store.read_artifact("surrogate-1") == b"tokens"
    mount.rename(tmp_path / "elsewhere")
    mount.mkdir()
    store = make() if restarted else store
    read(store, key(1))  # out of its own disk
    assert store.read_artifact("surrogate-1") == b"tokens"
    calls = (
        lambda: store.open(key(2)),
        lambda: store.held([key(1)]),
        lambda: list(store.keys()),
        lambda: store.put(key(3), cache(3)),
        lambda: store.delete(key(1)),
        lambda: store.write_artifact("surrogate-1", b"others"),
        lambda: store.writing().__enter__(),
    )
    for call in calls:
        with pytest.raises(StoreUnreachableError, match=GONE):
            call()
    assert list(mount.iterdir()) == []
    mount.rmdir()
    (tmp_path / "elsewhere").rename(mount)
    assert key(1) in make()


def test_another_store_in_its_place_is_none(make, mount, tmp_path):
    store = make()
    store.put(key(1), cache(1))
    read(store, key(1))
    mount.rename(tmp_path / "elsewhere")
    make("stranger").put(key(2), cache(2))  # it never knew better
    line = (
        f"lies another store than before: mount the right file system again; to start anew, delete {tmp_path / 'one'}"
    )
    for asked in (store, make()):
        read(asked, key(1))  # out of its own disk
        calls = (
            lambda asked=asked: asked.open(key(2)),
            lambda asked=asked: list(asked.keys()),
            lambda asked=asked: asked.read_artifact("surrogate-1"),
            lambda asked=asked: asked.put(key(3), cache(3)),
            lambda asked=asked: asked.delete(key(2)),
            lambda asked=asked: asked.writing().__enter__(),
        )
        for call in calls:
            with pytest.raises(StoreUnreachableError, match=line):
                call()
    assert key(2) in make("stranger")
    shutil.rmtree(mount)
    (tmp_path / "elsewhere").rename(mount)
    assert key(1) in make()


def test_no_way_leads_to_another_store_in_its_place(mount, tmp_path, caplog):
    """Of a process that goes on, asked again at once after each outage."""
    address = f"file://{mount / 'corpus'}"
    backend = open_store(address, timeouts=Timeouts(pause_s=0.0)).backend
    backend.put("artifacts/map", [b"ours"])
    mount.rename(tmp_path / "elsewhere")
    with pytest.raises(StoreUnreachableError, match=GONE):
        backend.read("artifacts/map")
    stranger = open_store(address).backend
    stranger.put("artifacts/map", [b"theirs"])
    for call in (
        lambda: backend.read("artifacts/map"),
        lambda: list(backend.names("artifacts/")),
        lambda: list(backend.listing("artifacts/")),
        lambda: backend.folders(""),
        lambda: backend.put("artifacts/map", [b"late"]),
        lambda: backend.swap("artifacts/map", b"late", b"theirs"),
        lambda: backend.delete("artifacts/map"),
    ):
        with pytest.raises(StoreUnreachableError, match="another store than before"):
            call()
    assert stranger.read("artifacts/map") == b"theirs"
    gone, other = caplog.messages  # one line for each of both
    assert GONE in gone
    assert "another store than before" in other


@pytest.mark.parametrize("before", ["", "seen"])
def test_a_store_without_an_id_is_one_too(make, mount, before):
    """Those of earlier versions, whose disk tiers remember that they saw it."""
    make().put(key(1), cache(1))
    manifest = mount / "corpus" / "store.json"
    fields = json.loads(manifest.read_text())
    assert fields.pop("id")
    manifest.write_text(json.dumps(fields))
    seen = mount.with_name("two") / "seen"
    if before:
        store = make("two")
        seen.write_text(before)
    store = make("two")
    assert key(1) in store
    shutil.rmtree(mount)
    with pytest.raises(StoreUnreachableError, match=f"{GONE}; to start anew, delete {mount.with_name('two')}"):
        list(store.keys())
    make("stranger").put(key(2), cache(2))  # it has an id
    with pytest.raises(StoreUnreachableError, match="another store than before"):
        list(make("two").keys())


def test_a_new_tenant_makes_no_store_on_an_empty_mount_point(tmp_path, mount):
    root = replica_of(f"file://{mount / 'corpus'}", tmp_path / "near", None)
    first, second = (root / "tenants" / name / "kv" for name in ("acme", "other"))
    open_store(root / "kv").put(key(1), cache(1))
    open_store(first).put(key(1), cache(1))
    assert (mount / "corpus" / "tenants" / "acme" / "store.json").is_file()
    mount.rename(tmp_path / "elsewhere")
    mount.mkdir()
    with pytest.raises(StoreUnreachableError, match=GONE):
        open_store(second).put(key(1), cache(1))
    assert list(mount.iterdir()) == []
    mount.rmdir()
    (tmp_path / "elsewhere").rename(mount)
    open_store(second).put(key(1), cache(1))


def test_machines_that_make_it_at_the_same_time_make_one(tmp_path):
    for number in range(20):
        place = tmp_path / str(number)
        stores = [open_store(f"file://{place}") for _ in range(4)]
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda store: store.put(key(1), cache(1)), stores))
        for store in stores:
            assert key(1) in store


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_file_server_that_is_away_is_no_damage(make, monkeypatch, code):
    make().put(key(1), cache(1))
    store = make("two")

    monkeypatch.setattr(os, "pread", failing(code))
    with pytest.raises(EntryDamagedError):  # of this file alone
        store.open(key(1))
    monkeypatch.setattr(os, "open", failing(code))
    monkeypatch.setattr(Path, "read_bytes", failing(code))
    with pytest.raises(StoreUnreachableError, match="see that it is mounted"):
        store.open(key(1))

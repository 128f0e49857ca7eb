"""A store key: without it no entry and no artifact that is used can be written, and a sealed store is not opened."""

import os
import shutil

import pytest
import torch
from forging import digest, forge, header_of, sealed
from reading import assert_holds, cache, key, path_of

from blend.errors import ConfigError, EntryDamagedError, StoreError
from blend.store import open_store, read_store_key, read_words
from blend.types import ChunkCache

SECRET, OTHER = b"sixteen bytes at least", b"another key of some bytes"


def assert_refused(store, key, message):
    with pytest.raises(EntryDamagedError, match=message):
        store.open(key)
    assert key not in store


@pytest.fixture
def store(tmp_path):
    """Sealed, with an entry and an artifact."""
    store = open_store(tmp_path, key=SECRET)
    store.put(key(1), cache())
    store.write_artifact("map", b"content")
    return store


@pytest.mark.parametrize("other", [None, SECRET + b"x", SECRET[:-1], OTHER])
def test_another_key_or_none(store, tmp_path, other):
    (tmp_path / "sealed").unlink()
    foreign = open_store(tmp_path, key=other)
    said = "with a store key" if other is None else "was not written with this store key"
    assert_refused(foreign, key(1), said)
    with pytest.raises(EntryDamagedError, match=said):
        foreign.read_artifact("map")
    foreign.put(key(1), cache(1))
    foreign.write_artifact("map", b"new")
    assert_holds(foreign, key(1), cache(1))
    assert_refused(store, key(1), "was not written with this store key")
    with pytest.raises(EntryDamagedError, match="was not written with this store key"):
        store.read_artifact("map")


def test_who_has_no_key_cannot_change_an_entry(store):
    """The checksums of the forgery are right; they are no keyed digests."""
    path = path_of(store, key(1))
    raw = path.read_bytes()

    def other_data(header, data):
        changed = bytes(len(data))
        ends = [(header[f"{n:03d}.k"]["data_offsets"][0], header[f"{n:03d}.v"]["data_offsets"][1]) for n in range(3)]
        sums = [digest(changed[begin:end]) for begin, end in ends]
        header["__metadata__"]["checksums"] = ",".join(sums)
        return changed

    for forged in (forge(raw, other_data), forge(raw, None), sealed(header_of(raw), b"")):
        path.write_bytes(forged)
        assert_refused(store, key(1), "was not written with this store key")


def test_an_entry_is_bound_to_its_key_and_every_layer_to_its_place(tmp_path):
    store = open_store(tmp_path, key=SECRET)
    one, other = torch.zeros(1, 5, 4), torch.ones(1, 5, 4)
    store.put(key(1), ChunkCache((one, other), (one, other), 0))
    raw = path_of(store, key(1)).read_bytes()
    path_of(store, key(2)).parent.mkdir(exist_ok=True)
    path_of(store, key(2)).write_bytes(raw)
    assert_refused(store, key(2), "another key")
    # Both layers are as long, and genuine.
    start = 8 + int.from_bytes(raw[:8], "little")
    half = (len(raw) - start) // 2
    path_of(store, key(1)).write_bytes(raw[:start] + raw[start + half :] + raw[start : start + half])
    with store.open(key(1)) as reader:
        for index in range(2):
            with pytest.raises(EntryDamagedError, match=f"layer {index}: it is not what was written"):
                reader.layer(index)


def test_an_artifact_is_bound_to_its_name(store, tmp_path):
    shutil.copy(tmp_path / "artifacts" / "map", tmp_path / "artifacts" / "other")
    with pytest.raises(EntryDamagedError, match="store key"):
        store.read_artifact("other")


def test_a_digest_for_one_purpose_is_none_for_another(tmp_path):
    """Who may write artifacts, through the program, must not get digests of layers made that way."""
    store = open_store(tmp_path, key=SECRET)
    content = bytearray(b"x\n" + bytes(range(1, 159)))
    keys, values = torch.frombuffer(content, dtype=torch.float32).reshape(2, 1, 5, 4)
    store.put(key(1), ChunkCache((keys,), (values,), 0))
    (layer,) = header_of(path_of(store, key(1)).read_bytes())["__metadata__"]["checksums"].split(",")
    store.write_artifact("x", bytes(content[2:]))
    assert layer.encode() not in (tmp_path / "artifacts" / "x").read_bytes()


def test_the_key_is_written_nowhere(tmp_path):
    secret = os.urandom(70)
    store = open_store(tmp_path, key=secret)
    store.put(key(1), cache())
    store.write_artifact("map", b"content")
    store.describe("abc", {"model": "tiny"})
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for said in (written, repr(vars(store)).encode()):
        for part in (secret[:16], secret[:16].hex().encode(), repr(secret)[2:20].encode()):
            assert part not in said


def test_a_short_key_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"16 are the least.*urandom"):
        open_store(tmp_path / "store", key=SECRET[:15])
    assert not (tmp_path / "store").exists()


def secret_file(path, content, mode=0o600):
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_key_out_of_a_file(tmp_path, end):
    assert read_store_key(secret_file(tmp_path / "key", SECRET + end)) == SECRET
    assert read_store_key(str(secret_file(tmp_path / "bytes", bytes(range(100)) + end))) == bytes(range(100))


def test_a_key_file_of_no_use(tmp_path):
    with pytest.raises(ConfigError, match=r"key has 9 bytes, 16 are the least.*urandom"):
        read_store_key(secret_file(tmp_path / "key", b"too short\n"))
    with pytest.raises(ConfigError, match="longer than"):
        read_store_key(secret_file(tmp_path / "key", bytes(1 << 20)))
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "key" / "below"):
        with pytest.raises(ConfigError, match=r"cannot be read.*name another file"):
            read_store_key(path)


def test_a_key_that_everyone_may_read_is_warned_of(tmp_path):
    path = secret_file(tmp_path / "key", SECRET, 0o644)
    with pytest.warns(UserWarning, match="chmod 600"):
        assert read_store_key(path) == SECRET


# The mark of a sealed store: what writes to a store, sealed artifacts first.
SEALING = {
    "artifact": lambda store: store.write_artifact("map", b"content"),
    "note": lambda store: store.put_manifest("sources/_", b"{}"),
    "manifest": lambda store: store.swap_manifest("indexes/_/manifest.json", b"{}", None),
}


@pytest.mark.parametrize("how", SEALING)
def test_without_its_key_a_sealed_store_is_not_opened(tmp_path, how):
    store = open_store(tmp_path, key=SECRET)
    store.put(key(1), cache())
    assert not store.check_key()
    SEALING[how](store)
    assert store.check_key()
    store.describe("abc", {"model": "tiny"})
    with pytest.raises(StoreError, match="is sealed with a store key: give --store-key"):
        open_store(tmp_path)
    with pytest.raises(StoreError, match=r"another store key.*remove 'sealed'"):
        open_store(tmp_path, key=OTHER)
    assert key(1) in open_store(tmp_path, key=SECRET)
    assert read_words(tmp_path)["abc"] == {"model": "tiny"}


@pytest.mark.parametrize(("secret", "words"), [(None, "give --store-key"), (OTHER, "another store key")])
def test_a_shared_one_is_not_written_to(tmp_path, secret, words):
    """Nothing is asked of a store elsewhere when it is opened."""
    place = f"file://{tmp_path / 'store'}"
    open_store(place, key=SECRET).write_artifact("map", b"content")
    other = {
        "put": lambda store: store.put(key(1), cache()),
        "delete": lambda store: store.delete(key(1)),
        "no artifact": lambda store: store.delete_artifact("map"),
    }
    for write in (SEALING | other).values():
        with pytest.raises(StoreError, match=words):
            write(open_store(place, key=secret))
    assert open_store(place, key=SECRET).read_artifact("map") == b"content"


def test_a_sealed_store_of_before_has_no_check_and_a_damaged_one_names_the_way_out(store, tmp_path):
    (tmp_path / "sealed").write_bytes(b"kvblend artifact 1 0000\n")
    with pytest.raises(StoreError, match="remove 'sealed'"):
        open_store(tmp_path, key=SECRET)
    (tmp_path / "sealed").unlink()
    open_store(tmp_path)
    again = open_store(tmp_path, key=SECRET)
    assert_holds(again, key(1), cache())
    assert again.read_artifact("map") == b"content"
    again.write_artifact("map", b"more")
    assert (tmp_path / "sealed").is_file(), "it gets one with the next artifact"

"""A store in one file: whole or not there, and taken in as far as the store itself would use it."""

from __future__ import annotations

import io
import json
import stat
import tarfile

import pytest
from blend.store.admin import export_store, import_store, pin, pinned, write_sources

from blend.errors import StoreError
from blend.store import open_store
from blend.store.backend import cache_name
from blend.store.disk import DiskBackend

SECRET = b"sixteen bytes at least"
END = "kvblend-archive.json"


@pytest.fixture
def filled(tmp_path, key, cache):
    def make(name, secret=None):
        store = open_store(tmp_path / name, key=secret)
        for number in range(3):
            store.put(key(number), cache(number))
        store.write_artifact("map", b"content")
        store.describe("abc", {"model": "tiny"})
        write_sources(store, "", key(0).namespace, {key(0).namespace: {key(0).digest: "a.md"}})
        pin(store.backend, key(0).digest, on=True)
        return store

    return make


def contents(store):
    """Every name but the generation with its bytes."""
    rooms = ("objects/", "artifacts/", "namespaces/", "sources/", "pins/", "indexes/")
    names = [name for room in rooms for page in store.backend.names(room) for name in page]
    return {name: store.backend.read(name, 1 << 20) for name in names}


def archive_of(path, members):
    """A tar file of these bytes by name, and the record at its end."""
    sizes = []
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo("x")
            info.size, info.pax_headers = len(content), {"path": name}
            archive.addfile(info, io.BytesIO(content))
            sizes.append(info.size)
        end = json.dumps({"format": 1, "names": len(sizes), "bytes": sum(sizes)}).encode()
        info = tarfile.TarInfo(END)
        info.size = len(end)
        archive.addfile(info, io.BytesIO(end))
    return path


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.filterwarnings("error")
def test_there_and_back(tmp_path, filled, secret):
    store, file = filled("one", secret), tmp_path / "all.tar"
    done = export_store(store, file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with tarfile.open(file) as archive:
        assert [*contents(store), END] == archive.getnames()
    other = open_store(tmp_path / "two", key=secret)
    assert import_store(lambda: other, file) == done._replace(refused=())
    assert contents(other) == contents(store)
    assert other.knows_its_key == (secret is not None)
    with pytest.raises(StoreError, match="there already"):
        export_store(store, file)


def test_an_outage_while_it_is_written_leaves_no_file(tmp_path, filled, monkeypatch):
    store, file = filled("one"), tmp_path / "all.tar"
    (tmp_path / "before").mkdir()
    opened, real = [], DiskBackend.open

    def fail_at_the_third(self, name, head):
        opened.append(name)
        if len(opened) == 3:
            raise StoreError("the store is gone")
        return real(self, name, head)

    monkeypatch.setattr(DiskBackend, "open", fail_at_the_third)
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(StoreError, match="is gone"):
        export_store(store, file)
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_part_of_a_file_is_refused_before_anything_is_put(tmp_path, filled):
    file = tmp_path / "all.tar"
    export_store(filled("one"), file)
    whole = file.read_bytes()

    def not_opened():
        raise AssertionError("nothing is to be put")

    for length in (0, 100, 512, len(whole) // 2, len(whole) // 2 // 512 * 512, len(whole) - 1024 - 512):
        file.write_bytes(whole[:length])
        with pytest.raises(StoreError, match="blend store export"):
            import_store(not_opened, file)
    with tarfile.open(file, "w") as archive:
        archive.add(tmp_path / "one" / "store.json", "artifacts/x")
    with pytest.raises(StoreError, match="is not whole"):
        import_store(not_opened, file)
    with pytest.raises(StoreError, match="cannot be read"):
        import_store(not_opened, tmp_path / "nowhere.tar")


NO_NAMES = (
    "objects/x",
    "objects/abcd/zz/0123456789.safetensors",
    "objects/abcd/01/0123456789.safetensors/more/ffff.safetensors",
    "objects/abcd/01/\0x.safetensors",
    "objects/a.b/01/01.safetensors",
    "objects/../../x",
    "artifacts/" + "a" * 300,
    "artifacts/./x",
    "pins/../artifacts/x",
    "pins/x",
    "namespaces/x",
    "sources/a/b",
    "indexes/manifest.json",
    "indexes/_/../manifest.json",
    "elsewhere/x",
    "store.json",
    "generation",
    "sealed",
)


def test_names_that_no_store_gives_are_left_out_and_counted(tmp_path, key, cache):
    store = open_store(tmp_path / "one")
    store.put(key(1), cache(1))
    good = store.backend.read(cache_name(key(1)), 1 << 20)
    file = archive_of(tmp_path / "x.tar", {**dict.fromkeys(NO_NAMES, good), cache_name(key(1)): good})
    other = open_store(tmp_path / "two")
    done = import_store(lambda: other, file)
    assert (done.names, len(done.refused)) == (1, len(NO_NAMES))
    assert list(contents(other)) == [cache_name(key(1))]


def test_what_is_sealed_is_replaced_by_nothing_that_is_not(tmp_path, filled):
    sealed = filled("sealed", SECRET)
    sealed.put_manifest("indexes/_/manifest.json", b'{"files": {}}')
    before = contents(sealed)
    plain = filled("plain")
    plain.write_artifact("map", b"FORGED")
    plain.put_manifest("indexes/_/manifest.json", b"{}")
    plain.describe("abc", {"model": "another"})
    file = tmp_path / "plain.tar"
    export_store(plain, file)
    done = import_store(lambda: open_store(tmp_path / "sealed", key=SECRET), file)
    assert done.names == 0
    assert len(done.refused) == 6
    assert contents(sealed) == before
    with pytest.raises(StoreError, match="sealed with a store key"):
        import_store(lambda: open_store(tmp_path / "sealed"), file)


def test_each_kind_of_content_is_looked_at(tmp_path, filled):
    store = filled("one")
    members = {name: bytearray(content) for name, content in contents(store).items()}
    for content in members.values():
        content[-1] ^= 1
    members["namespaces/def.json"] = b"[1]"
    other = open_store(tmp_path / "two")
    done = import_store(lambda: other, archive_of(tmp_path / "x.tar", members))
    assert done.names == 0
    assert contents(other) == {}
    assert pinned(other.backend) == frozenset()


def index(store, chunks=b"chunks", named=b"chunks"):
    import hashlib

    files = {"chunks-1.jsonl": {"bytes": len(named), "sha256": hashlib.sha256(named).hexdigest()}}
    store.backend.put("indexes/_/chunks-1.jsonl", [chunks])
    store.put_manifest("indexes/_/manifest.json", json.dumps({"files": files}).encode())


def test_an_index_comes_with_its_files_and_after_them(tmp_path, monkeypatch):
    store, file, other = open_store(tmp_path / "one"), tmp_path / "all.tar", open_store(tmp_path / "two")
    index(store)
    members = contents(store)
    manifest_first = dict(sorted(members.items(), key=lambda one: "manifest" not in one[0]))
    real, put = DiskBackend.put, []

    def noted(self, name, blobs, **how):
        put.append(name)
        return real(self, name, blobs, **how)

    with monkeypatch.context() as patch:
        patch.setattr(DiskBackend, "put", noted)
        assert import_store(lambda: other, archive_of(file, manifest_first)).names == 2
    assert put[:2] == ["indexes/_/chunks-1.jsonl", "indexes/_/manifest.json"]
    index(store, chunks=b"others")
    done = import_store(lambda: other, archive_of(file, contents(store)))
    assert (done.names, len(done.refused)) == (0, 2)
    assert contents(other) == members


def test_a_few_bytes_that_stand_for_many_are_left_out(tmp_path):
    """A sparse member of the old GNU format: 512 bytes are there, it says that it has 2 GB."""

    def octal(number, width):
        return f"{number:0{width - 1}o}\0".encode()

    head = bytearray(tarfile.TarInfo("artifacts/x").tobuf(tarfile.GNU_FORMAT))
    head[156:157], head[124:136] = b"S", octal(512, 12)
    head[386:398], head[398:410], head[482], head[483:495] = octal(0, 12), octal(512, 12), 0, octal(600 << 20, 12)
    head[148:156] = b" " * 8
    head[148:156] = f"{sum(head):06o}\0 ".encode()
    end = json.dumps({"format": 1, "names": 1, "bytes": 600 << 20}).encode()
    info = tarfile.TarInfo(END)
    info.size = len(end)
    (tmp_path / "x.tar").write_bytes(bytes(head) + b"x" * 512 + info.tobuf() + end.ljust(512, b"\0") + bytes(1024))
    store = open_store(tmp_path / "store")
    done = import_store(lambda: store, tmp_path / "x.tar")
    assert done.refused == ("artifacts/x: no name of a store",)

"""Entries that others changed: in every tier and codec damage is noticed, said and mended, and what is sound is kept."""

import http.server
import os
import random
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest
import redis
import torch
from cases import cache_chunks, make_layout
from click.testing import CliRunner
from far_stores import FAR, open_far
from models import decoder
from reading import assert_holds, cache, key, path_of, read
from servers import redis_address, redis_port, s3_environment

from blend.cli.store import command
from blend.config import BlendConfig
from blend.errors import EntryDamagedError, StoreError
from blend.prefill.blender import Blender
from blend.store import ChunkPool, Timeouts, open_store
from blend.store.admin import remove_copies, verify_entry
from blend.store.backend import cache_name

LAYOUT = make_layout()
REUSE = BlendConfig("none", correction=False)
SECRET = b"sixteen bytes at least"
ENCODINGS = [("native", None), ("int8", SECRET), ("int4", None)]
TRIES = 6  # of each place and codec


def blender_of(store):
    return Blender(decoder("llama"), store, REUSE)


def addresses(blender):
    return [blender.encoder(LAYOUT.prefix).identity.key(chunk) for chunk in LAYOUT.chunks]


def changed(draw, raw, others):
    """What may lie in the place of an entry instead: changed, cut, extended, exchanged, half of another."""
    content = bytearray(raw)
    begin = 8 + int.from_bytes(raw[:8], "little")
    where = draw.choice([(0, 8), (8, begin), (36, 68), (begin, len(raw)), (len(raw) - 1, len(raw))])
    content[draw.randrange(*where)] ^= 1 << draw.randrange(8)
    page = draw.randrange(len(raw) // 4096 + 1) * 4096
    other = draw.choice(others)
    middle = draw.randrange(begin, len(raw))
    return draw.choice(
        [
            *[bytes(content)] * 5,
            raw[: draw.randrange(len(raw))],
            b"",
            raw + bytes(draw.randrange(1, 5000)),
            raw[:page] + bytes(len(raw[page : page + 4096])) + raw[page + 4096 :],
            other,
            raw[:middle] + other[middle:],
            (2**63).to_bytes(8, "little") + raw[8:],
        ]
    )


@pytest.fixture(params=["disk", "memory", *FAR])
def place(request, tmp_path):
    """Opens the same store again, and the tier of it whose entries are changed."""

    def reopen(**options):
        if request.param in FAR:
            return open_far(request, tmp_path, **options)
        store = open_store("memory:" if request.param == "memory" else tmp_path / "store", **options)
        store.pool = None
        return store

    return reopen, request.param


@pytest.mark.parametrize(("codec", "secret"), ENCODINGS, ids=[codec for codec, _ in ENCODINGS])
def test_every_change_is_noticed_and_no_answer_is_wrong(place, codec, secret):
    reopen, kind = place
    draw = random.Random(f"{kind} {codec}")
    store = reopen(codec=codec, key=secret)
    blender = cache_chunks(blender_of(store), LAYOUT)
    intact = blender.prefill(LAYOUT)
    assert store.backend.wait(20)
    keys = addresses(blender)
    tier = [*store.backend.tiers.values()][-1]
    raws = [tier.read(cache_name(address)) for address in keys]
    noticed = 0
    for _ in range(TRIES):
        victim = draw.randrange(len(keys))
        name = cache_name(keys[victim])
        content = changed(draw, raws[victim], raws[:victim] + raws[victim + 1 :])
        if content == raws[victim]:
            continue
        tier.put(name, [content])
        again = store if kind == "memory" else reopen(codec=codec, key=secret)
        blend = blender_of(again).prefill(LAYOUT)
        if kind == "tiered":  # the far place has it
            assert torch.equal(blend.logits, intact.logits)
            assert all(blend.hits)
        else:
            assert not blend.hits[victim]
            assert blend.problems or (content == b"" and kind == "redis")
            assert blender_of(again).remember(blend) == 1
            assert verify_entry(again, name) == ""
        assert again.backend.wait(20)
        noticed += 1
        tier.put(name, [raws[victim]])
    assert noticed >= TRIES - 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_numbers_that_are_not_finite_are_damage_though_their_digests_are_right(value, part):
    blender = cache_chunks(blender_of(open_store("memory:")), LAYOUT)
    encoder = blender.encoder(LAYOUT.prefix)
    ((_, sound),) = encoder.encode([LAYOUT.chunks[1]])
    tensors = [tensor.clone() for tensor in getattr(sound, part)]
    tensors[2][0, 3, 5] = value
    address = addresses(blender)[1]
    blender.store.put(address, replace(sound, **{part: tuple(tensors)}))
    assert "not finite" in verify_entry(blender.store, cache_name(address))
    blend = blender.prefill(LAYOUT)
    assert blend.hits == (True, False, True, True)
    assert "layer 2 holds numbers that are not finite" in blend.problems[0]
    assert blend.logits.isfinite().all()
    blender.remember(blend)
    assert verify_entry(blender.store, cache_name(address)) == ""


def test_a_file_that_changes_while_its_chunk_is_in_memory_changes_no_answer(tmp_path):
    pool = ChunkPool(1 << 20)
    blender = cache_chunks(blender_of(open_store(tmp_path, memory_bytes=pool)), LAYOUT)
    intact = blender.prefill(LAYOUT)
    path = path_of(blender.store, addresses(blender)[1])
    content = bytearray(path.read_bytes())
    content[-100:] = bytes(100)
    with path.open("r+b") as file:  # the same file, in place
        file.write(content)
    assert torch.equal(blender.prefill(LAYOUT).logits, intact.logits)
    blend = blender_of(open_store(tmp_path)).prefill(LAYOUT)
    assert blend.hits == (True, False, True, True)


def as_pipe(path):
    os.mkfifo(path)


def as_folder(path):
    path.mkdir()
    (path / "precious").write_text("of someone else")


def as_loop(path):
    path.symlink_to(path)


def as_device(path):
    path.symlink_to("/dev/zero")


def as_sparse(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("make", [as_pipe, as_folder, as_loop, as_device, as_sparse])
def test_what_is_no_file_is_damage_of_one_name_and_a_new_one_takes_its_place(tmp_path, make):
    store = open_store(tmp_path / "store")
    store.put(key(1), cache(1))
    store.put(key(2), cache(2))
    store.write_artifact("map", b"content")
    store.describe("abc", {"model": "tiny"})
    names = [cache_name(key(1)), "artifacts/map", "generation", "namespaces/abc.json", "sources/_.x"]
    store.put_manifest(names[-1], b"{}")
    for name in names:
        if make is as_sparse and name.startswith(("artifacts", "sources")):
            continue  # may be large
        path = store.backend.root / name
        path.unlink()
        make(path)
    damaged, sound = store.open_many([key(1), key(2)])
    assert isinstance(damaged, EntryDamagedError)
    sound.close()
    assert store.generation == ""
    assert store.namespaces()["abc"] == {}
    if make is not as_sparse:
        with pytest.raises(EntryDamagedError):
            store.read_artifact("map")
        raw, _ = store.read_manifest(names[-1])
        assert store.swap_manifest(names[-1], b"[]", raw)
    small = open_store(tmp_path / "store", budget_bytes=3000)
    for number in (3, 4, 5):
        small.put(key(number), cache(number))
    store.put(key(1), cache(1))
    assert_holds(store, key(1), cache(1))
    store.write_artifact("map", b"new")
    assert store.read_artifact("map") == b"new"
    assert store.generation
    if make is as_folder:
        precious = [*store.backend.root.rglob("precious")]
        assert len(precious) == len(names)
        assert {path.read_text() for path in precious} == {"of someone else"}


def as_text(path):
    path.write_text("years of work")


def as_nothing_at_all(path):
    """The file is lost."""


@pytest.mark.parametrize("make", [as_pipe, as_device, as_folder, as_text, as_nothing_at_all])
def test_a_lost_or_damaged_manifest_is_replaced_and_no_cache_is_lost(tmp_path, make):
    root = tmp_path / "store"
    open_store(root).put(key(1), cache(1))
    (root / "store.json").unlink()
    make(root / "store.json")
    store = open_store(root)
    assert store.readable([key(1)]) == {key(1)}
    store.put(key(2), cache(2))
    assert open_store(root).readable([key(1), key(2)]) == {key(1), key(2)}
    set_aside = list(root.glob("store.json.damaged-*"))
    assert len(set_aside) == (make is not as_nothing_at_all)
    assert all(path.read_text() == "years of work" for path in set_aside if make is as_text)


def test_a_manifest_of_a_later_format_is_left_alone(tmp_path):
    root = tmp_path / "store"
    open_store(root).put(key(1), cache(1))
    later = '{"kind": "kvblend store", "format": 2}'
    (root / "store.json").write_text(later)
    with pytest.raises(StoreError, match="upgrade kvblend"):
        open_store(root)
    assert (root / "store.json").read_text() == later


def as_list(client, name):
    client.rpush(name, "a")


def as_hash(client, name):
    client.hset(name, "a", "b")


def as_nothing(client, name):
    client.set(name, b"")


@pytest.mark.parametrize("make", [as_list, as_hash, as_nothing])
def test_a_name_of_another_type_in_redis_is_no_outage(tmp_path, make):
    store = open_store(f"{redis_address(0)}/{tmp_path.name}")
    client = redis.Redis(port=redis_port())
    store.put(key(1), cache(1))
    store.put(key(2), cache(2))
    store.write_artifact("map", b"content")
    store.put_manifest("sources/_.x", b"{}")
    for name in (cache_name(key(1)), "artifacts/map", "generation", "sources/_.x"):
        full = f"kvblend:{tmp_path.name}:{name}"
        assert client.delete(full)
        make(client, full)
    damaged, sound = store.open_many([key(1), key(2)])
    assert damaged is None if make is as_nothing else isinstance(damaged, EntryDamagedError)
    sound.close()
    raw, content = store.read_manifest("sources/_.x")
    assert content is None
    assert store.swap_manifest("sources/_.x", b"[]", raw)
    with store.writing():
        store.put(key(1), cache(1))
        store.write_artifact("map", b"new")
    assert_holds(store, key(1), cache(1))
    assert store.read_artifact("map") == b"new"


def half(piece, begin, content):
    return piece[: len(piece) // 2]


def half_later(piece, begin, content):
    return piece[: len(piece) // 2] if begin else piece


def more_later(piece, begin, content):
    return piece + b"x" if begin else piece


def moved_later(piece, begin, content):
    return content[begin - 1 : begin - 1 + len(piece)] if begin else piece


@pytest.fixture(scope="module")
def lying():
    """A server of objects that may send other bytes than it says: its objects, and what it does to the bytes of an answer."""

    class Server(http.server.ThreadingHTTPServer):
        objects: Mapping[str, bytes] = MappingProxyType({})
        change = None

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            content = self.server.objects.get(self.path.split("/", 2)[2])
            bounds = re.findall(r"\d+", self.headers.get("Range", ""))
            body = content or b""
            self.send_response(404 if content is None else 206)
            if content is not None:
                begin, end = int(bounds[0]), min(int(bounds[1]), len(content) - 1)
                body = content[begin : end + 1]
                if self.server.change:
                    body = self.server.change(body, begin, content)
                self.send_header("Content-Range", f"bytes {begin}-{end}/{len(content)}")
                self.send_header("ETag", '"always the same"')
                self.send_header("Last-Modified", "Tue, 01 Jan 2030 00:00:00 GMT")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("change", [half, half_later, more_later, moved_later])
def test_an_object_server_that_lies_about_its_bytes(lying, monkeypatch, change):
    written = open_store("memory:")
    whole = cache(1, tokens=2000)  # more than comes along when it is opened
    written.put(key(1), whole)
    lying.objects = {cache_name(key(1)): written.backend.read(cache_name(key(1)))}
    for name, value in s3_environment(lying.server_port).items():
        monkeypatch.setenv(name, value)
    store = open_store("s3://bucket", timeouts=Timeouts(2, 2, 0.01))
    lying.change = None
    assert_holds(store, key(1), whole)
    lying.change = change
    with pytest.raises(EntryDamagedError):
        read(store, key(1))
    lying.objects = {cache_name(key(1)): lying.objects[cache_name(key(1))][::-1]}
    lying.change = None
    with pytest.raises(EntryDamagedError):
        read(store, key(1))


ODD = (
    "objects/README",
    "objects/x.safetensors",
    "objects/a/b.safetensors",
    f"objects/{key(1).namespace}/zz/we ird.safetensors",
    f"objects/{key(1).namespace}/zz/ab.safetensors",
    "artifacts/README.md",
    "artifacts/map",
    "pins/.DS_Store",
    "namespaces/.DS_Store",
)


@pytest.mark.parametrize("kind", ["disk", "redis"])
def test_files_of_others_are_left_alone_and_stop_no_command(tmp_path, kind):
    root = tmp_path / "store"
    caches = root / "kv"
    if kind == "redis":
        caches = f"{redis_address(0)}/{tmp_path.name}"
    store = open_store(caches)
    store.put(key(1), cache(1))
    for name in ODD:
        store.backend.put(name, [b"of others"])
    if kind == "disk":
        os.close(os.open(bytes(caches / "objects" / key(1).namespace / "56") + b"/\xff.safetensors", os.O_CREAT))
        for action in ([], ["ls"], ["verify"], ["verify", "--delete"], ["prune", "--older-than", "1"]):
            result = CliRunner().invoke(command, [*action, "--store", str(root)])
            assert result.exit_code == 0, (action, result.output, result.exception)
    assert [*store.keys()] == [key(1)]
    assert store.stats().entries == 1
    assert store.artifacts() == ["map"]
    assert remove_copies(store.backend) == 0
    assert store.prune((), key(1).namespace) == 1
    assert all(store.backend.read(name) == b"of others" for name in ODD)


def test_a_machine_with_another_key_deletes_no_copy(tmp_path):
    address = f"file://{tmp_path / 'far'}"
    options = {"cache": tmp_path / "near", "hot": redis_address(1)}
    right = open_store(address, key=SECRET, **options)
    right.put(key(1), cache(1))
    right.write_artifact("map", b"content")
    read(right, key(1))
    assert right.backend.wait(20)
    name = cache_name(key(1))
    for other in (None, b"another key of some bytes"):
        wrong = open_store(address, key=other, **options)
        with pytest.raises(EntryDamagedError):
            wrong.open(key(1))
        assert all(tier.read(name) for tier in right.backend.tiers.values())
    assert_holds(right, key(1), cache(1))


def test_what_another_key_sealed_is_not_removed_as_damaged(tmp_path):
    root = tmp_path / "store"
    sealed = open_store(root / "kv", key=SECRET)
    sealed.put(key(1), cache(1))
    sealed.write_artifact("map", b"content")
    mark = root / "kv" / "sealed"
    mark.write_bytes(b"damaged")
    result = CliRunner().invoke(command, ["verify", "--delete", "--store", str(root)])
    assert isinstance(result.exception, StoreError)
    assert_holds(sealed, key(1), cache(1))

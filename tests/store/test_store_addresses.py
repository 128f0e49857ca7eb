"""Addresses of stores: what is shown of them, and what lies below one."""

import json
from pathlib import Path

import pytest
from reading import key

from blend.errors import ConfigError, StoreUnreachableError
from blend.store import open_store
from blend.store.addresses import FILE, inside, is_address, origin_of, replica_of, shown, store_name


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("redis://:secret@host:1/0", "redis://host:1/0"),
        ("redis://host:1/0/name?password=secret&username=me", "redis://host:1/0/name"),
        ("s3://me:secret@bucket/x", "s3://bucket/x"),
        ("s3://bucket/x?token=secret#secret", "s3://bucket/x"),
        ("file:///mnt/what?/a#b", "file:///mnt/what?/a#b"),
        ("redis://[secret/0", "redis://..."),
    ],
)
def test_what_is_shown_holds_no_secret(address, line):
    assert shown(address) == line


def test_an_error_holds_no_secret(caplog):
    store = open_store("redis://127.0.0.1:1/0?password=secret")
    with pytest.raises(StoreUnreachableError, match="see that it is up") as caught:
        store.open(key(1))
    assert "secret" not in str(caught.value) + caplog.text
    assert caplog.text


@pytest.mark.parametrize(
    ("address", "below"),
    [
        ("s3://bucket/x/", "s3://bucket/x/tenants/acme"),
        ("file:///mnt/what?", "file:///mnt/what?/tenants/acme"),
        ("redis://host:1/0/name?password=p", "redis://host:1/0/name/tenants/acme?password=p"),
    ],
)
def test_what_lies_below(address, below):
    assert inside(address, "tenants", "acme") == below


@pytest.mark.parametrize("given", ["redis://host:1", "redis://host:1/", "redis://host:1/0"])
def test_a_redis_without_a_number_is_its_first_database(given, tmp_path):
    root = replica_of(given, tmp_path / "near", None)
    origin = origin_of(root / "tenants" / "acme" / "kv")
    assert origin.address == "redis://host:1/0/tenants/acme"
    open_store(root / "tenants" / "acme" / "kv")
    (root / FILE).write_text(json.dumps({"kind": "kvblend replica", "address": "redis://host:1", "hot": None}))
    assert replica_of(given, root, None) == root  # made before the number was written out


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ("s3:/bucket/x", "s3:/... is no address of a store: write s3://..."),
        ("GS:/bucket", "write gs://..."),
        ("az:container", "write az://..."),
        ("redis:/me:secret@host/0", "write redis://..."),
        ("file:/mnt/x", "write file:///..."),
        (Path("s3://bucket/x"), "write s3://... as text"),
    ],
)
def test_an_address_that_lacks_a_slash_is_no_directory(given, remedy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        open_store(given)
    assert remedy in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_servers_store_has_no_budget_of_its_own():
    with pytest.raises(ConfigError, match="give --store-cache"):
        open_store("redis://host:1/0", budget_bytes=1)


def test_a_directory_that_looks_like_an_address_takes_its_whole_path(tmp_path):
    assert not is_address(tmp_path / "s3:" / "x")
    open_store(tmp_path / "s3:" / "x")


def test_a_store_is_named_by_its_address_and_a_folder_by_its_path(tmp_path):
    replica = replica_of("redis://me:secret@host:1/0/name", tmp_path / "copy", None)
    assert store_name(replica) == "redis://host:1/0/name"
    deep = replica / "tenants" / "acme" / "corpora" / "handbook" / "index"
    assert store_name(deep) == "redis://host:1/0/name/tenants/acme/corpora/handbook/index"
    assert store_name(tmp_path / "plain" / "index") == str(tmp_path / "plain" / "index")

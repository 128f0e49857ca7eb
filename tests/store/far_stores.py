"""Stores on real servers, which tests start on loopback.

KVBLEND_TEST_BUCKET=az://container, gs://bucket or s3://bucket has the tests use that bucket in place of a server of their own,
with the credentials that users set in the environment. Each test writes below a name of its own, and leaves it there. Tests in
which the bucket fails need it on loopback, over plain HTTP; those that tell the server what to do wrong are skipped.
"""

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
from servers import BUCKET, given_bucket, redis_address, s3, s3_environment
from wire import Proxy

from blend.store import ChunkStore, open_store

FAR = ("objects", "redis", "tiered")
_ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "az": "AZURE_STORAGE_ENDPOINT", "gs": "GOOGLE_BASE_URL"}


def bucket_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The address of a store in a bucket, the same one for a test; its credentials are in the environment afterwards."""
    given = given_bucket(tmp_path)
    if given is not None:
        return given
    for name, value in s3_environment(s3().port).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{tmp_path.name}"


def bucket_proxy(monkeypatch: pytest.MonkeyPatch, address: str) -> Proxy:
    """In front of the server of the bucket: all that is opened from now on goes through it."""
    variable = _ENDPOINTS.get(address.partition("://")[0], "its endpoint")
    endpoint = urlsplit(os.environ.get(variable, ""))
    if endpoint.hostname != "127.0.0.1" or endpoint.port is None:
        pytest.skip(f"{variable} names no server on loopback, whose connections could be made to fail")
    proxy = Proxy(endpoint.port)
    monkeypatch.setenv(variable, urlunsplit(endpoint._replace(netloc=f"127.0.0.1:{proxy.port}")))
    return proxy


def tell_bucket(fault: str) -> None:
    """Have the S3 server of the tests do this wrong from now on; nothing, where it is empty."""
    if given_bucket(Path()) is None:
        s3().fault.write_text(fault)
    elif fault:
        pytest.skip("the bucket that KVBLEND_TEST_BUCKET names cannot be told what to do wrong")


def open_far(request: pytest.FixtureRequest, tmp_path: Path, **options: Any) -> ChunkStore:
    """A store on real servers, the same one for a test however often it is opened."""
    if request.param == "redis":
        return open_store(f"{redis_address(0)}/{tmp_path.name}", **options)
    address = bucket_of(request.getfixturevalue("monkeypatch"), tmp_path)
    if request.param == "objects":
        return open_store(address, **options)
    return open_store(address, cache=tmp_path / "near", hot=redis_address(1), **options)

"""Servers that answer, but too slowly, or that refuse what does not fit: nobody waits for ever, nobody else is disturbed."""

import threading
import time

import pytest
from servers import redis_address

from blend.errors import StoreError, StoreUnreachableError
from blend.store import Timeouts, open_store

HASTE = Timeouts(connect_s=0.5, answer_s=0.5, pause_s=60.0)
NAME = "objects/ab/cd/cdef.safetensors"


def test_a_server_that_drips_is_an_outage_in_time(failing_bucket):
    address, proxy = failing_bucket
    backend = open_store(address, timeouts=HASTE).backend.tiers["far"]
    backend.put(NAME, [bytes(1 << 20)])
    blob, into = backend.open(NAME), memoryview(bytearray(1 << 19))
    proxy.set("dripping")
    for call in (lambda: backend.open(NAME), lambda: blob.read(1 << 18, into)):
        began = time.monotonic()
        with pytest.raises(StoreUnreachableError, match="see that it is up"):
            call()
        assert time.monotonic() - began < 60  # dripped, the first bytes alone take more than a minute


def test_a_refused_put_disturbs_no_reader():
    full = redis_address(0, "--maxmemory", "12mb", "--maxmemory-policy", "noeviction")
    backend = open_store(full).backend.tiers["far"]
    backend.put(NAME, [bytes(4 << 20)])
    refused, read, failed = threading.Event(), [], []

    def work():
        into = memoryview(bytearray(3 << 20))
        while not refused.is_set():
            try:
                backend.open(NAME).read(1 << 20, into)
                read.append(into)
            except Exception as error:
                failed.append(error)

    readers = [threading.Thread(target=work) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(20):
        with pytest.raises(StoreError, match="is full"):
            backend.put("objects/ab/ef/efff.safetensors", [bytes(10 << 20)])
    refused.set()
    for reader in readers:
        reader.join()
    assert not failed
    assert read

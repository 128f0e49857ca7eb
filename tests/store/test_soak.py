"""Faults at random over all tiers of a shared store; and that the soak sees what it is there to see.

KVBLEND_SOAK_FAULTS=10000 lets so many faults meet each seed, for hours.
"""

import logging
import os

import pytest
import servers
from soak import Soak, Wrong

from blend.errors import StoreUnreachableError
from blend.store.objects import ObjectBackend
from blend.store.tiered import TieredBackend

FAULTS = int(os.environ.get("KVBLEND_SOAK_FAULTS", "25"))
pytestmark = pytest.mark.timeout(600 + 10 * FAULTS)  # faults take their time


@pytest.fixture
def soak(tmp_path, monkeypatch):
    """Of a seed."""
    for name, value in servers.s3_environment(servers.s3().port).items():
        monkeypatch.setenv(name, value)
    servers.redis_port()
    logging.getLogger("kvblend.store").setLevel(logging.WARNING)
    begun = []

    def begin(seed):
        begun.append(Soak(seed, tmp_path))
        return begun[0]

    yield begin
    for one in begun:
        one.close()


@pytest.mark.parametrize("seed", range(2))
def test_faults_at_random_over_all_tiers(soak, seed):
    run = soak(seed)
    run.run(FAULTS)
    assert run.met.total() >= FAULTS
    assert run.counts["layers compared"] > 20
    assert run.counts["names compared with the bucket"] > 50


def _stores_nothing(monkeypatch):
    monkeypatch.setattr(ObjectBackend, "put", lambda *given, **more: True)


def _fails_for_nothing(monkeypatch):
    def failing(*given):
        raise StoreUnreachableError("for nothing")

    monkeypatch.setattr(TieredBackend, "put", failing)


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (_stores_nothing, "is missing"),
        (_fails_for_nothing, "for nothing"),  # at the first step that the machine does not stand still for
    ],
)
def test_a_soak_sees(soak, monkeypatch, spoil, found):
    run = soak(0)
    spoil(monkeypatch)
    with pytest.raises(Wrong, match=rf"(?s)({found}).*seed 0, fault"):
        run.run(200)

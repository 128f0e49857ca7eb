"""Faults at random over all tiers of a shared store.

KVBLEND_SOAK_FAULTS=10000 lets so many faults meet each seed, for hours.
"""

import os
from contextlib import closing

import pytest
from soak import Soak

FAULTS = int(os.environ.get("KVBLEND_SOAK_FAULTS", "25"))


@pytest.mark.timeout(600 + 10 * FAULTS)  # faults take their time
@pytest.mark.parametrize("seed", range(2))
def test_faults_at_random_over_all_tiers(tmp_path, monkeypatch, seed):
    with closing(Soak(seed, tmp_path, monkeypatch)) as soak:
        soak.run(FAULTS)
    assert soak.counts["layers compared"] > 20
    assert soak.counts["names compared"] > 50

import random

import pytest

from blend.eval.machine import Machine
from blend.eval.report import Measurement, RunInfo, summarise

MACHINE = Machine("Test CPU", 4, 8 * 2**30, None, "TestOS 1", "3.12.0", 2, {"kvblend": "0.0", "torch": "2.0"})
INFO = RunInfo(
    "tiny-model", "made-up questions", "blend report --limit 12", {"ratio": 0.15}, MACHINE, "float32", "int8"
)
# method -> share of the full time, share of rows, loss of F1, KL
METHODS = {"full": (1.0, 1.0, 0.0, 0.0), "reuse": (0.05, 0.02, 0.3, 1.5), "blend": (0.2, 0.17, 0.05, 0.4)}


def make_measurements(records=12, methods=METHODS, **changes):
    rng = random.Random(0)
    rows = []
    for index in range(records):
        seconds, f1 = rng.uniform(4, 8), rng.uniform(0.4, 0.9)
        for name, (time, share, loss, kl) in methods.items():
            fields = {
                "ttft_s": seconds * time,
                "stages": {"load": 0.1 * seconds * time},
                "rows_total": 2000,
                "rows_computed": 2000 * share,
                "f1": f1 - loss,
                "kl": kl,
                "top1": 1 - kl / 10,
            }
            rows.append(Measurement(name, f"q{index}", f"answer of {name}", **{**fields, **changes}))
    return rows


@pytest.fixture
def report():
    return summarise(make_measurements(), info=INFO)


@pytest.fixture
def undefined_report():
    """Neither gold answers nor fidelity."""
    return summarise(make_measurements(3, **dict.fromkeys(("f1", "kl", "top1"))))


@pytest.fixture
def measurements():
    return make_measurements

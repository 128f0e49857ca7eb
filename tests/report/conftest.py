import random

import pytest

from blend.eval.machine import Machine
from blend.eval.report import Measurement, RunInfo, summarise

MACHINE = Machine(
    "Test CPU", 4, 8 * 2**30, None, "TestOS 1", "3.12.0", 2, {"kvblend": "0.0", "torch": "2.0", "faiss": None}
)
INFO = RunInfo(
    "tiny-model", "made-up questions", "blend report --limit 12", {"ratio": 0.15}, MACHINE, "float32", "int8"
)
# method -> share of the full time, share of rows, loss of F1, KL
METHODS = {"full": (1.0, 1.0, 0.0, None), "reuse": (0.05, 0.02, 0.3, 1.5), "blend": (0.2, 0.17, 0.05, 0.4)}


def make_measurements(records=12, methods=METHODS, tasks=("qa",), seed=0, **changes):
    rng = random.Random(seed)
    rows = []
    for index in range(records):
        seconds, f1 = rng.uniform(4, 8), rng.uniform(0.4, 0.9)
        for name, (time, share, loss, kl) in methods.items():
            fields = {
                "ttft_s": seconds * time,
                "stages": {"load": 0.1 * seconds * time, "recompute": 0.9 * seconds * time},
                "rows_total": 2000,
                "rows_computed": 2000 * share,
                "floor_s": seconds * time / 1.1,
                "f1": f1 - loss,
                "em": 0.0,
                "rouge_l": f1 - loss / 2,
                "kl": kl,
                "top1": None if kl is None else 1 - kl / 10,
                "task": tasks[index % len(tasks)],
            }
            rows.append(Measurement(name, f"q{index}", f"answer of {name}", **{**fields, **changes}))
    return rows


@pytest.fixture
def report():
    return summarise(make_measurements(), info=INFO)


@pytest.fixture
def undefined_report():
    """Neither gold answers nor fidelity nor a floor."""
    unknown = dict.fromkeys(("f1", "em", "rouge_l", "kl", "top1", "floor_s"))
    return summarise(make_measurements(3, **unknown, stages={}), info=RunInfo())


@pytest.fixture
def measurements():
    return make_measurements

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from blend.errors import ConfigError
from blend.eval.report import RunInfo, report_document, summarise, write_json

NUMBERS = ("ttft_s", "speedup", "floor_ratio", "rows_share", "f1", "em", "rouge_l", "kl", "top1")
DIFFERENCES = ("f1_diff", "em_diff", "rouge_l_diff", "kl_diff", "top1_diff", "ttft_diff")


def read(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_the_file_has_every_number_of_the_report_and_how_it_was_made(report, tmp_path):
    path = tmp_path / "new" / "out.json"
    write_json(report, path)
    found = read(path)
    assert list(found["methods"]) == ["full", "reuse", "blend"]
    for name, method in found["methods"].items():
        summary = report.method(name)
        assert all(isinstance(method[key], float) for key in NUMBERS)
        assert method["speedup"] == summary.speedup
        assert method["f1"] == summary.mean("f1")
        for key in DIFFERENCES:
            assert set(method[key]) == {"mean", "low", "high"}
        assert method["f1_diff"]["low"] == summary.differences["f1"].low
        assert method["f1_interval"] == {"low": summary.quality["f1"].low, "high": summary.quality["f1"].high}
        assert list(method["stages"]) == ["load", "recompute"]
    assert found["command"] == "blend report --limit 12"
    assert (found["model"], found["workload"]) == ("tiny-model", "made-up questions")
    assert found["config"] == {"ratio": 0.15}
    assert (found["dtype"], found["weights"]) == ("float32", "int8")
    assert found["machine"]["cpu"] == "Test CPU"
    assert found["versions"] == {"kvblend": "0.0", "torch": "2.0", "faiss": None}
    assert (found["reference"], found["record_count"], found["incomplete"]) == ("full", 12, [])


def test_one_object_a_measurement(report):
    records = report_document(report)["records"]
    assert len(records) == 36
    assert [(r["record_id"], r["method"]) for r in records[:4]] == [
        *(("q0", "full"), ("q0", "reuse"), ("q0", "blend"), ("q1", "full"))
    ]
    assert records[1]["answer"] == "answer of reuse"
    assert records[1]["rows_share"] == pytest.approx(0.02)
    assert records[1]["floor_ratio"] == pytest.approx(1.1)


def test_undefined_values_are_null(undefined_report, measurements, tmp_path):
    write_json(undefined_report, tmp_path / "out.json")
    reuse = read(tmp_path / "out.json")["methods"]["reuse"]
    for key in ("f1", "em", "rouge_l", "kl", "floor_ratio", "f1_diff", "f1_interval"):
        assert reuse[key] is None
    rows = measurements()
    rows[1] = replace(rows[1], kl=math.inf)
    write_json(summarise(rows, info=RunInfo(config={"x": math.nan})), tmp_path / "out.json")
    found = read(tmp_path / "out.json")
    assert found["methods"]["reuse"]["kl"] is None
    assert found["records"][1]["kl"] is None
    assert found["config"] == {"x": None}


def test_tasks_and_values_that_json_does_not_know(measurements, tmp_path):
    report = summarise(measurements(tasks=("a", "b")), info=RunInfo(config={"store": Path("caches")}))
    write_json(report, tmp_path / "out.json")
    found = read(tmp_path / "out.json")
    assert found["config"] == {"store": "caches"}
    assert found["tasks"]["a"]["blend"]["records"] == 6


def test_a_place_that_cannot_be_written_is_one_line_and_leaves_nothing(report, tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "out.json", tmp_path):
        with pytest.raises(ConfigError, match="cannot be written") as caught:
            write_json(report, path)
        assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("owner", "step"), [(os, "write"), (Path, "replace")])
def test_a_failed_write_keeps_the_old_file(report, tmp_path, monkeypatch, owner, step):
    path = tmp_path / "out.json"
    path.write_text("old")

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(owner, step, fail)
    with pytest.raises(ConfigError, match="No space left on device"):
        write_json(report, path)
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]

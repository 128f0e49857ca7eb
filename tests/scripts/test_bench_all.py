"""`scripts/bench_all`: broken parts, resumption, and machines side by side."""

import json
import sys
from pathlib import Path

import pytest
from commands import module

GOOD = ["bench_codecs", "--shape", "1,64,32", "--codec", "int8"]


def run(monkeypatch: pytest.MonkeyPatch, parts: dict[str, list[str]], *words: object) -> int:
    """The exit status when these parts replace the real ones."""
    found = module("bench_all")
    monkeypatch.setattr(found, "parts", lambda quick: parts)
    monkeypatch.setattr(sys, "argv", ["bench_all", *map(str, words)])
    return int(found.main())


def test_a_broken_part_stops_no_other_and_only_it_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = ["bench_codecs", "--codec", "unknown"]
    assert run(monkeypatch, {"broken": broken, "good": GOOD}, "--quick", "--out", tmp_path) == 1
    out, err = capsys.readouterr()
    assert "### broken\n\nnot measured" in out
    assert "| int8 | 0.5" in out
    assert "broken failed" in err
    [log] = tmp_path.glob("*/quick/broken.log")
    assert "invalid choice: 'unknown'" in log.read_text()
    assert run(monkeypatch, {"broken": GOOD, "good": GOOD}, "--quick", "--out", tmp_path) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "==>" in line] == ["==> broken"]
    assert run(monkeypatch, {"good": [*GOOD, "int4"]}, "--quick", "--out", tmp_path) == 0
    assert "==> good" in capsys.readouterr().err, "another command is measured anew"


def test_each_machine_has_tables_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, {"good": GOOD}, "--out", tmp_path) == 0
    [here] = tmp_path.glob("*/whole")
    other = tmp_path / "another" / "whole"
    other.mkdir(parents=True)
    held = json.loads((here / "parts.json").read_text().replace("int8 | 0.5", "int8 | 9.5"))
    (other / "parts.json").write_text(json.dumps({**held, "summary": "another CPU"}))
    capsys.readouterr()
    assert run(monkeypatch, {}, "--out", tmp_path, "--show") == 0
    assert capsys.readouterr().out.count("## ") == 2
    assert run(monkeypatch, {"good": GOOD}, "--out", tmp_path, "--show") == 0
    theirs, ours = sorted(capsys.readouterr().out.split("\n## "), key=lambda text: "another CPU" not in text)
    assert "int8 | 9.5" in theirs
    assert "int8 | 9.5" not in ours
    assert "int8 | 0.5" in ours
    assert "int8 | 0.5" not in theirs

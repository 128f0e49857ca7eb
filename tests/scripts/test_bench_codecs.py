"""`scripts/bench_codecs`, as a process of its own over a tiny model and a small set of questions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from study.codecs import Measured, read, table
from tests.tiny_model import save_tiny_model

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_codecs"


def script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)


def test_a_run_measures_every_codec_once_and_shows_them_beside_each_other(tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(100)]
    save_tiny_model(tmp_path / "tiny", " ".join(words))
    lines = []
    for number in range(34):
        chunks = [{"title": f"{number}.{part}", "text": " ".join(words[number + part :][:20])} for part in range(3)]
        lines.append({"id": str(number), "question": words[number], "answers": ["w1"], "chunks": chunks})
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "results.jsonl"
    run = ("run", tmp_path / "questions.jsonl", "--model", tmp_path / "tiny", "--out", out, "--records", "2")
    more = ("--stores", tmp_path / "stores", "--apart", "2", "--tokens", "4")
    for _ in range(2):
        done = script(*run, *more)
        assert done.returncode == 0, done.stderr
        assert len(read(out)) == 2 * 3
    by_codec = {one.codec: one for one in read(out)}
    assert set(by_codec) == {"bfloat16", "int8", "int4"}
    assert by_codec["int4"].nbytes < by_codec["int8"].nbytes < by_codec["bfloat16"].nbytes
    assert all(one.kl >= 0 and 0 <= one.top1 <= 1 for one in by_codec.values())
    shown = script("show", out).stdout
    assert "2 records" in shown
    assert all(f"| {codec} |" in shown for codec in by_codec)
    quick = [line.split("|")[-3:-1] for line in script("show", out, "--shape", "2,256,64").stdout.splitlines()[2:-2]]
    assert len(quick) == 3
    assert all(float(cell) > 0 for cells in quick for cell in cells)


def test_the_table_takes_the_records_that_all_codecs_have() -> None:
    found = [Measured(str(n), "bfloat16", 0.1 * n, 1.0, 100, 10) for n in range(3)]
    found += [Measured(str(n), "int8", 0.2 * n, 0.5, 51, 10) for n in (1, 2)]
    lines = list(table(found))
    assert lines[-1].strip() == "2 records"
    assert [cell.strip() for cell in lines[3].strip("|").split("|")][:5] == ["int8", "5", "0.510", "0.3000", "2.000"]


def test_speed_is_a_line_a_codec() -> None:
    done = script("speed", "--shape", "1,8,4", "--codec", "bfloat16", "int8")
    assert done.returncode == 0, done.stderr
    assert [line.split("|")[1].strip() for line in done.stdout.splitlines()] == ["codec", "---", "bfloat16", "int8"]

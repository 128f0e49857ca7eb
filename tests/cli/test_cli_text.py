"""Text and paths in bytes that are not UTF-8, standard streams that are closed, and input that never ends."""

import json
import os
import subprocess
import sys

import pytest
from blend_process import one_line
from places import PYTHONPATH

ODD = os.fsdecode(b"caf\xe9 \xff")


def test_a_question_on_standard_input_that_is_not_utf8(filled):
    result = filled("answer", "-", stdin=ODD)
    assert (result.code, result.out) == (2, "")
    assert "the question on standard input cannot be read ('utf-8' codec" in one_line(result.err)


def test_a_store_and_a_dataset_whose_paths_are_not_utf8(blend, documents, tmp_path):
    """Any bytes may name a file; they are shown as what they are."""
    odd = blend.at(tmp_path / ODD / "store")
    (documents / "market.md").rename(documents / f"{ODD}.md")
    made = odd("precompute", documents, "--chunk-tokens", "64")
    assert made.code == 0, made.err
    assert r"caf\udce9 \udcff/store" in made.out
    assert odd("answer", "x", "-q", "--max-new-tokens", "2").code == 0
    assert r"caf\udce9 \udcff/store" in odd("store").out
    chunks = [{"title": "Hall", "text": f"Hall {part} has doors."} for part in range(2)]
    dataset, out = tmp_path / f"{ODD}.jsonl", tmp_path / f"{ODD}.json"
    dataset.write_text(json.dumps({"id": "q", "question": "doors?", "answers": ["2"], "chunks": chunks}))
    told = odd("report", "--dataset", dataset, "--json", out, "--max-new-tokens=2")
    assert told.code == 0, told.err
    assert json.loads(out.read_bytes())["workload"] == dataset.name
    page = out.with_suffix(".html")
    assert odd("analyze", "--dataset", dataset, "--html", page).code == 0
    assert rb"caf\udce9 \udcff.jsonl" in page.read_bytes()
    dataset.write_bytes(b'{"id": "\xff"}')
    assert "not UTF-8 text" in odd("report", "--dataset", dataset).refused(6)


def _python(*arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, **options}
    return subprocess.run(arguments, capture_output=True, text=True, env=env, check=False)


@pytest.mark.parametrize(
    ("call", "code", "told"),
    [
        ("env >&-", 0, ""),
        ("env --json >&-", 0, ""),
        ("frob 2>&-", 2, ""),
        ("frob >&- 2>&-", 2, ""),
        ("answer - <&-", 2, "there is no standard input"),
        ("answer - 0>/dev/null", 2, "standard input cannot be read"),
    ],
)
def test_streams_that_are_closed(call, code, told):
    result = _python("/bin/sh", "-c", f"exec {sys.executable} -m blend {call}")
    assert (result.returncode, result.stdout) == (code, "")
    assert told in result.stderr
    assert "Traceback" not in result.stderr

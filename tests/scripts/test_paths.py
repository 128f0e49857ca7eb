"""What all scripts do at their end."""

import subprocess
import sys

from commands import ROOT, command

RESULTS = ROOT / "docs" / "results" / "locomo.json"


def test_a_reader_that_stops_early_is_no_mistake():
    words = [sys.executable, str(ROOT / "scripts" / "bench_peers"), "locomo", "--json", str(RESULTS), "--show"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as script:
        script.stdout.close()
        assert (script.stderr.read(), script.wait()) == ("", 141)


def test_a_file_that_is_not_there_is_named(tmp_path):
    done = command("bench_peers", "locomo", "--json", tmp_path / "none" / "r.json", "--data", tmp_path / "data.json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "data.json" in done.stderr
    assert "Traceback" not in done.stderr

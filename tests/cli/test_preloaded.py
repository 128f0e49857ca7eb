"""The processes of the tests end with the tests."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from places import PYTHONPATH

STARTER = """
import json, subprocess, sys, time
server = subprocess.Popen([sys.executable, sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
server.stdin.write(sys.argv[2] + "\\n")
server.stdin.flush()
print(json.dumps([server.pid, json.loads(server.stdout.readline())["pid"]]), flush=True)
time.sleep(600)
"""


def lives(pid: int) -> bool:
    try:
        return not Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0].startswith("Z")
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process that its parent ended")
def test_nothing_is_left_of_tests_that_were_killed(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("in", "out", "err")]
    os.mkfifo(files[0])  # which the command waits to open
    request = json.dumps({"start": ["serve", "--help"], "files": files, "env": {}, "cwd": str(tmp_path)})
    script = Path(__file__).with_name("preloaded.py")
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, script, request], stdout=subprocess.PIPE, text=True, env=env
    ) as starter:
        assert starter.stdout is not None
        pids = json.loads(starter.stdout.readline())
        assert all(map(lives, pids))
        starter.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(lives, pids))

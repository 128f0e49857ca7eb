"""Runs `blend` in forked processes that have the heavy imports behind them: real processes with real signals, in a second each.

Started by `conftest` as a script. Each line on standard input is a request, answered by one line on standard output:
{"start": [arguments], "files": [stdin, stdout, stderr], "env": {...}, "cwd": "..."}   -> {"pid": n}
{"ended": pid}                                                   -> {"code": null, exit code or minus signal}
"""

import ctypes
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any


def die_with_parent() -> None:
    """Be killed when the parent ends, however it ends: an interrupted run of the tests leaves no process behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def serve() -> None:
    die_with_parent()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import sentence_transformers  # noqa: F401

    import blend.rag  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        answer = {"pid": start(request)} if "start" in request else {"code": code_of(request["ended"])}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def start(request: dict[str, Any]) -> int:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # libraries' threads are idle here
        pid = os.fork()
    if pid == 0:
        code = 70
        try:
            code = run(request)
        finally:
            os._exit(code)
    return pid


def run(request: dict[str, Any]) -> int:
    die_with_parent()
    os.setsid()
    os.umask(0o022)
    # Tests that run in the background inherit that it is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        with Path(request["files"][descriptor]).open(mode) as file:
            os.dup2(file.fileno(), descriptor)
        setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - the process's own
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    sys.argv = ["blend", *request["start"]]
    from blend.cli import main

    try:
        main()
    except SystemExit as stop:
        sys.stdout.flush()
        sys.stderr.flush()
        return stop.code if isinstance(stop.code, int) else 1
    return 0


def code_of(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


if __name__ == "__main__":
    serve()

"""Runs `blend` in forked processes that have the heavy imports behind them: real processes with real signals, in a second each.

Started by `conftest` as a script. Each line on standard input is a request, answered by one line on standard output:
{"start": [arguments], "files": [stdin, stdout, stderr], "env": {...}, "cwd": "..."}   -> {"pid": n}
{"wait": pid, "timeout": seconds}                                                   -> {"code": exit code or minus signal}
"""

import ctypes
import json
import os
import signal
import sys
import time
import warnings
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
        answer = {"pid": start(request)} if "start" in request else {"code": wait(request)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def start(request: dict[str, Any]) -> int:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # libraries' threads are idle here
        pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        code = run(request)
    finally:
        os._exit(code)


def run(request: dict[str, Any]) -> int:
    die_with_parent()
    os.setsid()
    os.umask(0o022)
    # Tests that run in the background inherit that it is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    flags = (os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor, (path, flag) in enumerate(zip(request["files"], flags, strict=True)):
        os.dup2(os.open(path, flag, 0o644), descriptor)
    sys.stdin, sys.stdout, sys.stderr = (
        open(descriptor, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - the process's own streams
        for descriptor, mode in enumerate("rww")
    )
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


def wait(request: dict[str, Any]) -> int | None:
    deadline = time.monotonic() + request["timeout"]
    while time.monotonic() < deadline:
        pid, status = os.waitpid(request["wait"], os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


if __name__ == "__main__":
    serve()

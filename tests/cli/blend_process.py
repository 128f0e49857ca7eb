"""Calls of `blend` in processes of their own, and what tests read off them."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from places import PYTHONPATH

from blend.cli import blend as group
from blend.cli import exit_code_of

SHORT_CONTEXT = 512
CHUNKS = ("--chunk-tokens", "32")
ASK = ("answer", "How many crates are in lot 3?", "--json", "--max-new-tokens", "8")
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'kvblend[ray]'")
# No token in the home directory; workers that are not the last in the queue for the processor, and are not killed because
# something else on this machine takes its memory.
QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What was printed to standard output, which must be one JSON object and nothing else."""
        return json.loads(self.out)

    def refused(self, code: int) -> str:
        """The one line of an error with this exit code and no output."""
        assert (self.code, self.out) == (code, ""), self.err
        return one_line(self.err)


@dataclass
class Running:
    """A command that runs in its own process."""

    blend: Blend
    pid: int
    files: tuple[str, str, str]

    @property
    def out(self) -> str:
        return Path(self.files[1]).read_text(encoding="utf-8")

    @property
    def err(self) -> str:
        return Path(self.files[2]).read_text(encoding="utf-8")

    def until(self, happened: Callable[[], bool], timeout: float = 120) -> Running:
        deadline = time.monotonic() + timeout
        while not happened():
            assert time.monotonic() < deadline, f"did not happen: {self.err}"
            time.sleep(0.002)
        return self

    def url(self) -> str:
        """The address of a server, when it is ready."""
        self.until(lambda: "\n" in self.out)
        ready = re.fullmatch(r"Ready at (http://127\.0\.0\.1:[0-9]+)\n", self.out)
        assert ready is not None, self.err
        return ready[1]

    def send(self, number: signal.Signals) -> Running:
        os.kill(self.pid, number)
        return self

    def wait(self, timeout: float = 120) -> Result:
        code = self.blend.request(wait=self.pid, timeout=timeout)["code"]
        if code is None:
            self.send(signal.SIGKILL)
            self.blend.request(wait=self.pid, timeout=10)
            pytest.fail(f"still running after {timeout} s: {self.err}")
        is_file = [Path(path).is_file() for path in self.files]
        return Result(code, self.out if is_file[1] else "", self.err if is_file[2] else "")


@dataclass
class Blend:
    """Calls `blend` in forked processes. model, store: what the common options are, through the environment."""

    server: subprocess.Popen[str]
    folder: Path
    model: Path
    store: Path | None = None
    _count: list[int] = field(default_factory=lambda: [0])

    def request(self, **fields: Any) -> Any:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(fields, default=str) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def start(
        self,
        *arguments: str | Path,
        stdin: str = "",
        out: str | None = None,
        err: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Running:
        self._count[0] += 1
        base = self.folder / f"call-{self._count[0]}"
        base.with_suffix(".in").write_text(stdin, encoding="utf-8", errors="surrogateescape")
        files = (f"{base}.in", out or f"{base}.out", err or f"{base}.err")
        for path in files[1:]:
            Path(path).touch()
        store = {} if self.store is None else {"KVBLEND_STORE": str(self.store)}
        full_env = {"KVBLEND_MODEL": str(self.model), **store, **(env or {})}
        pid = self.request(start=[str(a) for a in arguments], files=files, env=full_env, cwd=str(self.folder))["pid"]
        return Running(self, pid, files)

    def __call__(self, *arguments: str | Path, **options: Any) -> Result:
        return self.start(*arguments, **options).wait()

    def here(self, *arguments: str | Path) -> Result:
        """The same in this process, which is quicker: for what ends before a model is loaded."""
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.chdir(self.folder)
            patch.setenv("KVBLEND_MODEL", str(self.model))
            if self.store is not None:
                patch.setenv("KVBLEND_STORE", str(self.store))
            words = [str(argument) for argument in arguments]
            code = exit_code_of(lambda: group.main(words, prog_name="blend", standalone_mode=False))
        return Result(code, out.getvalue(), err.getvalue())

    def at(self, store: Path) -> Blend:
        """The same with another store."""
        return Blend(self.server, self.folder, self.model, store, self._count)


@contextmanager
def preloaded() -> Iterator[subprocess.Popen[str]]:
    """The process that `Blend` takes, which forks a command's process with everything loaded."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVBLEND")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, "COLUMNS": "80", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).with_name("preloaded.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def entries(store: Path, kind: str = "isolated") -> list[Path]:
    """The files of all chunk caches "isolated" or "contextual"; namespaces say what they hold."""
    kinds = {path.stem: _kind(path.read_text()) for path in (store / "kv" / "namespaces").glob("*.json")}
    found = (store / "kv" / "objects").rglob("*.safetensors")
    return sorted(path for path in found if kinds.get(_namespace(store, path), "isolated") == kind)


def _namespace(store: Path, path: Path) -> str:
    return path.relative_to(store / "kv" / "objects").parts[0]


def _kind(words: str) -> str:
    return "contextual" if '"contextual"' in words else "isolated"


def one_line(text: str) -> str:
    """The last line of `text`, which must be the error line and carry no traceback before it."""
    assert "Traceback" not in text
    last = text.strip().splitlines()[-1]
    assert last.startswith("blend: "), text
    return last


def contents(store: Path) -> dict[str, bytes]:
    """Every byte of caches, artifacts and index by name; left out is what says when and how fast they were made."""
    names = {path.relative_to(store): path for path in store.rglob("*") if path.is_file()}
    kept = {
        name: path
        for name, path in names.items()
        if name.parts[1] not in ("generation", ".lock", ".writing", "namespaces")
    }
    return {str(name): path.read_bytes() for name, path in kept.items()}


class Undisturbed(NamedTuple):
    """What one process makes of the documents, and answers from it."""

    contents: dict[str, bytes]
    answer: dict[str, Any]


def all_caches(store: Path) -> int:
    return len(entries(store)) + len(entries(store, "contextual"))

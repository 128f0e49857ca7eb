"""Calls of `blend` in processes of their own, and what tests read off them."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import httpx
import pytest
from places import PYTHONPATH

from blend.cli import blend as group
from blend.cli import exit_code_of

Request = Callable[..., Any]
SHORT_CONTEXT = 512
CHUNKS = ("--chunk-tokens", "32")
ASK = ("answer", "How many crates are in lot 3?", "--json", "--max-new-tokens", "8")
ANSWER = ("answer", "When did the glacier open?", "--json", "--max-new-tokens", "4")


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
    blend: Blend
    pid: int
    out_file: Path
    err_file: Path

    @property
    def out(self) -> str:
        return self.out_file.read_text(encoding="utf-8") if self.out_file.is_file() else ""

    @property
    def err(self) -> str:
        return self.err_file.read_text(encoding="utf-8") if self.err_file.is_file() else ""

    def until(self, happened: Callable[[], bool], timeout: float = 120, every: float = 0.002) -> Running:
        deadline = time.monotonic() + timeout
        while not happened():
            assert time.monotonic() < deadline, f"did not happen: {self.err}"
            time.sleep(every)
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
        codes: list[int | None] = []

        def ended() -> bool:
            codes.append(self.blend.request(ended=self.pid)["code"])
            return codes[-1] is not None

        self.until(ended, timeout, every=0.01)
        return Result(codes[-1] or 0, self.out, self.err)


@dataclass
class Blend:
    """Calls `blend` in forked processes, with this model, this store and more variables in their environment."""

    request: Request
    folder: Path
    model: Path | str
    store: Path | None = None
    env: dict[str, str] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def start(
        self,
        *arguments: str | Path,
        stdin: str = "",
        out: Path | None = None,
        err: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> Running:
        base = self.folder / f"call-{next(self._numbers)}"
        base.write_text(stdin, encoding="utf-8", errors="surrogateescape")
        out, err = out or base.with_suffix(".out"), err or base.with_suffix(".err")
        out.touch()
        err.touch()
        env = self.variables() | (env or {})
        answer = self.request(start=list(map(str, arguments)), files=(base, out, err), env=env, cwd=self.folder)
        return Running(self, answer["pid"], out, err)

    def variables(self) -> dict[str, str]:
        store = {} if self.store is None else {"KVBLEND_STORE": str(self.store)}
        return {"KVBLEND_MODEL": str(self.model), **store, **self.env}

    def __call__(self, *arguments: str | Path, **options: Any) -> Result:
        return self.start(*arguments, **options).wait()

    def done(self, *arguments: str | Path, **options: Any) -> Result:
        """The same for a call that must succeed."""
        result = self(*arguments, **options)
        assert result.code == 0, result.err
        return result

    def precompute(self, *arguments: str | Path, **options: Any) -> Result:
        """In chunks of 64 tokens, with the figures as JSON."""
        return self.done("precompute", *arguments, "--chunk-tokens", "64", "--json", **options)

    def answer(self, *options: str | Path, **more: Any) -> Result:
        return self.done(*ANSWER, *options, **more)

    def here(self, *arguments: str | Path) -> Result:
        """The same in this process, which is quicker: for what ends before a model is loaded."""
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.chdir(self.folder)
            for name, value in self.variables().items():
                patch.setenv(name, value)
            words = [str(argument) for argument in arguments]
            code = exit_code_of(lambda: group.main(words, prog_name="blend", standalone_mode=False))
        return Result(code, out.getvalue(), err.getvalue())

    def listed(self) -> Any:
        """What `blend store` says of all that is there."""
        return self.here("store", "--json").json

    def at(self, store: Path) -> Blend:
        return replace(self, store=store)

    def shared(self, address: str, cache: Path) -> Blend:
        """The same with a store that machines share, and this machine's disk for it."""
        env = {**self.env, "KVBLEND_STORE": address, "KVBLEND_STORE_CACHE": str(cache)}
        return replace(self, store=None, env=env)


@contextmanager
def serving(
    blend: Blend, *arguments: str | Path, last: signal.Signals = signal.SIGTERM, **options: Any
) -> Iterator[tuple[Running, httpx.Client]]:
    """A server that is ready; it must end well when it is told to."""
    running = blend.start("serve", "--port", "0", *arguments, **options)
    with httpx.Client(base_url=running.url(), timeout=60) as client:
        try:
            yield running, client
        finally:
            result = running.send(last).wait()
    assert result.code == 0, result.err
    assert "Traceback" not in result.err
    assert result.out.count("\n") == 1


@contextmanager
def preloaded() -> Iterator[Request]:
    """Asks a process that has everything loaded and forks the commands' processes; see preloaded.py."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVBLEND")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, "COLUMNS": "80", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).with_name("preloaded.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        stdin, stdout = cast(IO[str], process.stdin), cast(IO[str], process.stdout)

        def request(**fields: Any) -> Any:
            stdin.write(json.dumps(fields, default=str) + "\n")
            stdin.flush()
            return json.loads(stdout.readline())

        yield request
        stdin.close()


def entries(store: Path, kind: str = "isolated") -> list[Path]:
    """The files of all chunk caches "isolated" or "contextual"; namespaces say what they hold."""
    namespaces = (store / "kv" / "namespaces").glob("*.json")
    contextual = {path.stem for path in namespaces if '"contextual"' in path.read_text()}
    objects = store / "kv" / "objects"
    spaces = {path: path.relative_to(objects).parts[0] for path in objects.rglob("*.safetensors")}
    return sorted(path for path, space in spaces.items() if (space in contextual) == (kind == "contextual"))


def caches(root: Path) -> set[str]:
    """Names of all chunk caches of a store whose "objects" lie in this folder."""
    return {str(path.relative_to(root)) for path in (root / "objects").rglob("*.safetensors")}


def all_caches(store: Path) -> int:
    return len(caches(store / "kv"))


def one_line(text: str) -> str:
    """The last line of `text`, which must be the error line and carry no traceback before it."""
    assert "Traceback" not in text
    last = text.strip().splitlines()[-1]
    assert last.startswith("blend: "), text
    return last


def files_of(store: Path) -> set[str]:
    """Caches, artifacts and index by name; left out is what says when and how fast they were made."""
    names = {path.relative_to(store) for path in store.rglob("*") if path.is_file()}
    return {str(name) for name in names if name.parts[1] not in ("generation", ".lock", ".writing", "namespaces")}


def record(number: int, sentences: int = 6) -> dict[str, Any]:
    """A question with its three chunks, as `--dataset` reads them."""
    texts = [f"Hall {number} has {part + 3} doors. " * sentences for part in range(3)]
    return {
        "id": f"q{number}",
        "question": f"How many doors has hall {number}?",
        "answers": ["3", "three"],
        "chunks": [{"title": f"Hall {number}", "text": text} for text in texts],
    }

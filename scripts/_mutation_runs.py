"""A tree's tests in forks of this process: which lines each reaches, and whether they notice a mutant.

Libraries are imported here once, so that a fork starts with them and takes seconds. The tree's own modules are never imported
here: every fork imports them anew, from the tree's files.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import sys
import threading
import time
import tomllib
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from _mutants import Mutant

Lines = dict[str, set[int]]
_MEMORY = 8 << 30  # bytes that a fork may take; a mutant may ask for memory without end
_UNSHARED = ("conftest", "hypothesis", "xdist")


@dataclass
class ReachedLines:
    """What one test reaches of the tree's files, its seconds, and whether it passes."""

    seconds: float = 0.0
    passed: bool = False
    lines: Lines = field(default_factory=lambda: defaultdict(set))


@dataclass
class FileCoverage:
    """Of a file of tests: what fixtures of the whole file reach, what each test does, and the modules that they import."""

    shared: Lines = field(default_factory=lambda: defaultdict(set))
    tests: dict[str, ReachedLines] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)

    def reaching(self, mutant: Mutant) -> list[str]:
        """The tests that run a mutant's code; those of the whole file where a shared fixture does."""
        by_test = {name: test.lines for name, test in self.tests.items() if test.passed}
        if _reaches(self.shared, mutant):
            return list(by_test)
        return [name for name, lines in by_test.items() if _reaches(lines, mutant)]

    def json(self) -> str:
        """As text."""
        tests = {
            name: {"seconds": test.seconds, "passed": test.passed, "lines": _sorted(test.lines)}
            for name, test in self.tests.items()
        }
        return json.dumps({"shared": _sorted(self.shared), "tests": tests, "modules": self.modules})

    @classmethod
    def from_json(cls, text: str) -> FileCoverage:
        """From that text."""
        content = json.loads(text)
        tests = {
            name: ReachedLines(
                test["seconds"], test["passed"], {path: set(lines) for path, lines in test["lines"].items()}
            )
            for name, test in content["tests"].items()
        }
        return cls({path: set(lines) for path, lines in content["shared"].items()}, tests, content["modules"])


def _sorted(lines: Lines) -> dict[str, list[int]]:
    return {path: sorted(numbers) for path, numbers in sorted(lines.items())}


def _reaches(lines: Lines, mutant: Mutant) -> bool:
    numbers = lines.get(mutant.path, set())
    if mutant.imported:
        return bool(numbers)
    return any(line in numbers for line in range(mutant.line, mutant.end_line + 1))


class Tree:
    """A copy of a project, which may be changed.

    Args:
        root: Its folder, with `pyproject.toml`.
        sources: Its files whose lines are traced.
        work: A folder for logs and what the tests write.
    """

    def __init__(self, root: Path, sources: Collection[str], work: Path) -> None:
        self.root = root
        self.sources = sources
        self.work = work
        self._journal = work / "mutated.json"
        work.mkdir(parents=True, exist_ok=True)
        options = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
        folders = options.get("tool", {}).get("pytest", {}).get("ini_options", {}).get("pythonpath", ["."])
        self.packages = [str((root / folder).resolve()) for folder in folders]
        self._preloaded: set[str] = set()
        if self._journal.exists():  # a run that was killed left a mutant in its place
            self._restore()

    # What the tests reach

    def coverage(self, file: str, limit: float) -> FileCoverage | None:
        """What a file's tests reach; kept in `work`. None where they end in no time or at once."""
        store = self.work / "coverage" / (file.replace("/", ".") + ".json")
        if not store.exists():
            store.parent.mkdir(exist_ok=True)
            ended = self._forked(lambda: self._traced(file, store), limit)
            if not store.exists():
                print(f"{file}: no coverage, {ended}", file=sys.stderr, flush=True)
                if ended != "timed out":
                    return None
                store.write_text(FileCoverage().json(), encoding="utf-8")  # or the next run waits as long
        coverage = FileCoverage.from_json(store.read_text(encoding="utf-8"))
        self._preload(coverage.modules)
        return coverage if coverage.tests else None

    def _traced(self, file: str, store: Path) -> int:
        tracer = _Tracer(self.root, self.sources)
        code = self._pytest([file], tracer)
        tracer.coverage.modules = sorted(name for name, module in sys.modules.items() if self._is_library(name, module))
        draft = store.with_suffix(".draft")
        draft.write_text(tracer.coverage.json(), encoding="utf-8")
        draft.replace(store)
        return code

    def _is_library(self, name: str, module: Any) -> bool:
        file = getattr(module, "__file__", None)
        if not file or name.split(".")[0] in _UNSHARED or name == "__main__":
            return False
        return not any(Path(file).is_relative_to(folder) for folder in self.packages)

    def _preload(self, names: Collection[str]) -> None:
        for name in names:
            if name not in self._preloaded and name not in sys.modules:
                with suppress(Exception):
                    importlib.import_module(name)
            self._preloaded.add(name)

    # Mutants

    def outcome(self, mutant: Mutant, tests: Sequence[str], limit: float) -> tuple[str, str]:
        """`killed`, `survived` or `timed out`, and the test that failed."""
        note = self.work / "killer"
        note.unlink(missing_ok=True)
        files = sorted({name.split("::")[0] for name in tests})
        with self._mutated(mutant):
            ended = self._forked(lambda: self._judged(files, tests, note), limit)
        killer = note.read_text(encoding="utf-8") if note.exists() else ""
        if ended == "timed out" and not killer:
            return ended, ""
        return ("survived" if ended == "0" else "killed"), killer or ended

    def _judged(self, files: list[str], tests: Sequence[str], note: Path) -> int:
        sys.dont_write_bytecode = True  # or the mutant's would be taken for the file's
        return self._pytest(["-x", *files], _Chosen(tests, note))

    @contextmanager
    def _mutated(self, mutant: Mutant) -> Iterator[None]:
        file = self.root / mutant.path
        source = file.read_bytes()
        changed = file.stat().st_mtime_ns
        content = {"path": mutant.path, "source": source.decode(), "changed": changed}
        self._journal.write_text(json.dumps(content), encoding="utf-8")
        try:
            file.write_bytes(mutant.applied(source))
            later = changed + 10**10  # so that the bytecode of the file is out of date
            os.utime(file, ns=(later, later))
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        content = json.loads(self._journal.read_text(encoding="utf-8"))
        file = self.root / content["path"]
        file.write_bytes(content["source"].encode())
        os.utime(file, ns=(content["changed"], content["changed"]))  # its bytecode is good again
        self._journal.unlink()

    # Forks

    def _pytest(self, arguments: Sequence[str], plugin: object) -> int:
        os.chdir(self.root)
        os.environ["PYTHONPATH"] = os.pathsep.join(self.packages)
        sys.path[:0] = self.packages
        options = [
            "-q",
            "-m",
            "not real",
            f"--basetemp={self.work / 'tmp'}",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
        ]
        options += [
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
        ]  # plugins among the libraries are imported already
        return int(pytest.main([*options, *arguments], plugins=[plugin]))

    def _forked(self, work: Callable[[], int], limit: float) -> str:
        """The exit code of `work` in a fork, a signal's name, or `timed out` after so many seconds."""
        child = os.fork()
        if not child:
            self._run_and_exit(work)
        descriptor = os.pidfd_open(child)
        try:
            in_time, _, _ = select.select([descriptor], [], [], limit)
        finally:
            os.close(descriptor)
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # with what the tests have started
            _, status = os.waitpid(child, 0)
        if not in_time:
            return "timed out"
        code = os.waitstatus_to_exitcode(status)
        return signal.Signals(-code).name if code < 0 else str(code)

    def _run_and_exit(self, work: Callable[[], int]) -> None:
        code = 70
        try:
            os.setsid()
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, hard))
            log = os.open(self.work / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for descriptor in (1, 2):
                os.dup2(log, descriptor)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


class _Tracer:
    """A pytest plugin that notes the lines of the sources that each test runs."""

    def __init__(self, root: Path, sources: Collection[str]) -> None:
        self.coverage = FileCoverage()
        self._lines = self.coverage.shared
        self._paths = {str(root / path): path for path in sources}

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        path = self._paths.get(frame.f_code.co_filename)
        if path is None:
            return None
        self._lines[path].add(frame.f_lineno)
        return self._trace_line

    def _trace_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._lines[self._paths[frame.f_code.co_filename]].add(frame.f_lineno)
        return self._trace_line

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Trace the test, with its own fixtures."""
        test = self.coverage.tests[item.nodeid] = ReachedLines()
        self._lines = test.lines
        begin = time.monotonic()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            self._lines = self.coverage.shared
            test.seconds = round(time.monotonic() - begin, 3)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """What a fixture of several tests reaches belongs to all of them."""
        before = self._lines
        if fixturedef.scope != "function":
            self._lines = self.coverage.shared
        try:
            return (yield)
        finally:
            self._lines = before

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Whether it passes."""
        test = self.coverage.tests[report.nodeid]
        test.passed = report.passed and (report.when == "setup" or test.passed)


class _Chosen:
    """A pytest plugin that runs these tests, the quickest files first, and notes the first that fails."""

    def __init__(self, tests: Sequence[str], note: Path) -> None:
        self._tests = set(tests)
        order = dict.fromkeys(name.split("::")[0] for name in tests)
        self._order = {file: place for place, file in enumerate(order)}
        self._note = note

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """These tests alone, file by file."""
        items[:] = [item for item in items if item.nodeid in self._tests]
        items.sort(key=lambda item: self._order[item.nodeid.split("::")[0]])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The first that fails."""
        if report.failed and not self._note.exists():
            self._note.write_text(report.nodeid, encoding="utf-8")

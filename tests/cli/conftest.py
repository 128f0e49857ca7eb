"""The command line in real processes, a tiny model and a precomputed store that tests copy."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.tiny_model import save_tiny_model

REPOSITORY = Path(__file__).parents[2]
SHORT_CONTEXT = 512
TOPICS = ("harbour", "orchard", "glacier", "library", "foundry", "market", "lighthouse", "quarry")


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What was printed to standard output, which must be one JSON object and nothing else."""
        return json.loads(self.out)


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

    def until(self, happened: Callable[[], bool], timeout: float = 60) -> Running:
        deadline = time.monotonic() + timeout
        while not happened():
            assert time.monotonic() < deadline, f"did not happen: {self.err}"
            time.sleep(0.002)
        return self

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
        base.with_suffix(".in").write_text(stdin, encoding="utf-8")
        files = (f"{base}.in", out or f"{base}.out", err or f"{base}.err")
        for path in files[1:]:
            Path(path).touch()
        store = {} if self.store is None else {"KVBLEND_STORE": str(self.store)}
        full_env = {"KVBLEND_MODEL": str(self.model), **store, **(env or {})}
        pid = self.request(start=[str(a) for a in arguments], files=files, env=full_env, cwd=str(self.folder))["pid"]
        return Running(self, pid, files)

    def __call__(self, *arguments: str | Path, **options: Any) -> Result:
        return self.start(*arguments, **options).wait()

    def at(self, store: Path) -> Blend:
        """The same with another store."""
        return Blend(self.server, self.folder, self.model, store, self._count)


@pytest.fixture(scope="session")
def server() -> Iterator[subprocess.Popen[str]]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVBLEND")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'kernels'}", "COLUMNS": "80"}
    env |= {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).with_name("preloaded.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="session")
def texts() -> dict[str, str]:
    """One Markdown document a topic, several chunks of 64 tokens each."""
    return {f"{topic}.md": _document(topic, number) for number, topic in enumerate(TOPICS)}


def _document(topic: str, number: int) -> str:
    paragraphs = (
        f"The {topic} of town {number} opened in {1800 + 7 * number + part}. Its keeper number {part} counts "
        f"{13 * part + number} visitors a day. The {topic} has {part + 2} gates and a bell of {100 + part} kilograms."
        for part in range(6)
    )
    return f"# The {topic}\n\n" + "\n\n".join(paragraphs) + "\n"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str]) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "\n".join(texts.values()))


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str]) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "other", "\n".join(texts.values()), seed=1)


@pytest.fixture(scope="session")
def short_model(tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str]) -> Path:
    folder = tmp_path_factory.mktemp("model") / "short"
    return save_tiny_model(folder, "\n".join(texts.values()), max_position_embeddings=SHORT_CONTEXT)


@pytest.fixture(scope="session")
def _documents(tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str]) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def documents(_documents: Path, tmp_path: Path) -> Path:
    """A copy of the documents, the test's own."""
    return Path(shutil.copytree(_documents, tmp_path / "documents"))


@pytest.fixture
def blend(server: subprocess.Popen[str], model: Path, tmp_path: Path) -> Blend:
    """The command line with the tiny model and an empty place for a store."""
    return Blend(server, tmp_path, model, tmp_path / "store")


@pytest.fixture(scope="session")
def _precomputed(
    server: subprocess.Popen[str], model: Path, _documents: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("precomputed")
    result = Blend(server, folder, model, folder / "store")("precompute", _documents, "--chunk-tokens", "64")
    assert result.code == 0, result.err
    return folder / "store"


@pytest.fixture
def filled(blend: Blend, _precomputed: Path, tmp_path: Path) -> Blend:
    """The command line with a store of its own that holds all documents."""
    shutil.copytree(_precomputed, tmp_path / "store")
    return blend


@pytest.fixture(scope="session")
def _indexed(server: subprocess.Popen[str], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("indexed")
    (folder / "lots").mkdir()
    for number in range(25):
        lines = (f"Lot {number}.{line} holds {number * line} crates of slate and {line} bells." for line in range(20))
        (folder / "lots" / f"{number}.md").write_text("\n\n".join(lines))
    result = Blend(server, folder, model, folder / "store")("precompute", folder / "lots", "--chunk-tokens", "32")
    assert result.code == 0, result.err
    shutil.rmtree(folder / "store" / "kv")
    return folder


@pytest.fixture
def indexed(blend: Blend, _indexed: Path, tmp_path: Path) -> Blend:
    """The command line with a store whose index holds the folder "lots" in chunks of 32 tokens, and no chunk cache."""
    shutil.copytree(_indexed, tmp_path, dirs_exist_ok=True)
    return blend


def entries(store: Path, kind: str = "alone") -> list[Path]:
    """The files of all chunk caches "alone" or "in company", or of all "maps"; namespaces say what they hold."""
    kinds = {path.stem: _kind(path.read_text()) for path in (store / "kv" / "namespaces").glob("*.json")}
    found = (store / "kv" / "objects").rglob("*.safetensors")
    return sorted(path for path in found if kinds.get(_namespace(store, path), "alone") == kind)


def _namespace(store: Path, path: Path) -> str:
    return path.relative_to(store / "kv" / "objects").parts[0]


def _kind(words: str) -> str:
    return "maps" if "context map" in words else "in company" if '"company"' in words else "alone"


def one_line(text: str) -> str:
    """The last line of `text`, which must be the error line and carry no traceback before it."""
    assert "Traceback" not in text
    last = text.strip().splitlines()[-1]
    assert last.startswith("blend: "), text
    return last

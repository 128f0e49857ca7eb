"""Importing this puts the checkout's packages on the path, in front of installed ones; `ended` runs a command.

A script that is started by a Python without torch starts again with the checkout's own environment.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blend_retrieval.document import Document

MODEL = "qwen2.5-coder-0.5b"
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "retrieval")]
sys.path[:0] = PACKAGES
_PYTHON = ROOT / ".venv" / "bin" / "python"

if find_spec("torch") is None:
    if not _PYTHON.exists() or sys.prefix == str(_PYTHON.parents[1]):
        raise SystemExit("this Python has no torch: run `scripts/venv test` first")
    os.execv(_PYTHON, [str(_PYTHON), *sys.argv])


def project_environment(threads: int) -> dict[str, str]:
    """The environment of this repository's commands: so many threads, and no options of the user's own."""
    paths = [*PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)}
    for name, value in os.environ.items():
        if name == "KVBLEND_CACHE" or not name.startswith("KVBLEND_"):
            variables.setdefault(name, value)
    return variables


def foreign_environment(**variables: str) -> dict[str, str]:
    """The environment of other people's programs: the user's own without our paths and threads, and these variables."""
    ours = ("PYTHONPATH", "OMP_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if name not in ours} | variables


def environment_of(folder: Path, *steps: Sequence[str]) -> Path:
    """The python of an environment for other people's programs, installed on first use by these arguments of `pip install`."""
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    requirements = "\n".join(map(" ".join, steps))
    if stamp.exists() and stamp.read_text(encoding="utf-8") == requirements:
        return python
    print(f"{folder}: installing {steps[-1][-1]}", file=sys.stderr, flush=True)
    run_whole(f"venv of {folder}", [sys.executable, "-m", "venv", str(folder)])
    for step in steps:
        run_whole(f"pip in {folder}", [str(python), "-m", "pip", "install", "--quiet", *step])
    stamp.write_text(requirements, encoding="utf-8")
    return python


def run_whole(
    name: str, command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> None:
    """Run a command. Raises SystemExit with the end of what it printed when it fails."""
    process = subprocess.run(
        command, cwd=cwd, env=env, text=True, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    if process.returncode:
        raise SystemExit(f"{name} ended with {process.returncode}:\n{process.stdout[-2000:]}")


def documentation() -> Sequence[Document]:
    """Python's own documentation, a document a module."""
    from blend_retrieval import load_documents, write_stdlib_corpus

    with tempfile.TemporaryDirectory() as folder:
        write_stdlib_corpus(Path(folder))
        return load_documents([folder]).documents


def command_line(text: str | None, *, rows: bool = False, model: str | None = None) -> argparse.ArgumentParser:
    """A command line that `text` describes. rows: with --json and --show; model: with --model and this default."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rows:
        parser.add_argument("--json", type=Path, required=True, help="the rows; read, added to, and shown")
        parser.add_argument("--show", action="store_true", help="show what --json holds")
    if model:
        parser.add_argument("--model", default=model, help="catalog name or directory")
    return parser


def server_options(
    parser: argparse.ArgumentParser, tiny: Mapping[str, object], *, passages: int, answer_tokens: int
) -> argparse.Namespace:
    """The options, with those of every script that loads a server with questions over a corpus. tiny: what --tiny sets."""
    parser.add_argument("--tiny", action="store_true", help="a random tiny model, and everything shorter: no meaning")
    parser.add_argument("--store", type=Path, help="keep the caches there; by default in a temporary folder")
    parser.add_argument("--threads", type=int, default=2, help="of each server (default 2)")
    parser.add_argument("--passages", type=int, default=passages, help=f"of the corpus (default {passages})")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=answer_tokens)
    options = parser.parse_args()
    if options.tiny:
        vars(options).update(tiny)
    return options


def ended(run: Callable[[], int | None]) -> int:
    """The exit code of a command; a mistake ends in one line on standard error, a reader that stops in none."""
    from blend.cli import PIPE_CLOSED
    from blend.errors import BlendError

    try:
        code = run() or 0
        sys.stdout.flush()
        return code
    except BlendError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python's last flush would fail
        return PIPE_CLOSED
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1

"""A demo corpus available on every machine: documentation strings of Python's standard library, one document per module."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from blend_retrieval.errors import CorpusError

_DEFAULT_MODULES = (
    "argparse base64 bisect collections configparser contextlib copy csv dataclasses datetime enum fnmatch "
    "functools glob gzip hashlib heapq html itertools json logging math os.path pathlib queue random re secrets "
    "shutil sqlite3 statistics string struct subprocess tempfile textwrap threading time urllib.parse zipfile"
)
DEFAULT_MODULES = tuple(_DEFAULT_MODULES.split())
"""What a newcomer asks about: some 200 chunks of at most 256 tokens, 40,000 tokens in all."""

SIDE_EFFECTS = frozenset({"__main__", "antigravity", "idlelib", "lib2to3", "pip", "test", "this", "tkinter", "turtle"})
"""Modules that open windows or browsers, print, or are programs; they are never imported."""

_RENDERER = Path(__file__).with_name("stdlib_render.py")
_TIMEOUT = 120.0  # seconds


def write_stdlib_corpus(folder: str | Path, modules: Sequence[str] | None = None) -> list[Path]:
    """Write one Markdown document per module into `folder` and return their paths.

    The result is the same in every run of one Python. Files are written only if their content changes.
    modules: `DEFAULT_MODULES` if None, without modules that this Python lacks (such as sqlite3 in a small build).
    Raises `CorpusError` for a name outside the standard library or in `SIDE_EFFECTS`, and if no module could be rendered.
    """
    names = tuple(DEFAULT_MODULES if modules is None else modules)
    for name in names:
        _check(name)
    rendered = render(names)
    if not rendered:
        raise CorpusError(f"no module out of {', '.join(names) or 'an empty list'} can be imported by {sys.executable}")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, markdown in rendered.items():
        path = target / f"{name}.md"
        content = markdown.encode()
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
        paths.append(path)
    return paths


def _check(name: str) -> None:
    top = name.partition(".")[0]
    if top in SIDE_EFFECTS:
        raise CorpusError(f"{name} does more than define things when it is imported; leave it out of the corpus")
    is_path = all(map(str.isidentifier, name.split(".")))
    if top not in sys.stdlib_module_names or not is_path:
        raise CorpusError(f"{name} is no module of Python's standard library; leave it out of the corpus")


def render(names: Sequence[str]) -> dict[str, str]:
    """Markdown by module. A separate, isolated process imports the modules."""
    command = [sys.executable, "-I", "-X", "utf8", "-W", "ignore", str(_RENDERER), *names]
    try:
        run = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise CorpusError(
            f"the documentation of {len(names)} modules cannot be read by {sys.executable} ({error})"
        ) from error
    lines = run.stdout.decode().splitlines()
    results = [json.loads(line) for line in lines if line.startswith("{")]
    return {result["module"]: result["markdown"] for result in results if "markdown" in result}

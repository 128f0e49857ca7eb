"""The repository's scripts: in processes of their own, and in this one, which has loaded what they import."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def command(name, *arguments, **environment):
    """The script as a command."""
    words = [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)]
    given = {**os.environ, **ENVIRONMENT, **environment}
    return subprocess.run(words, capture_output=True, text=True, timeout=560, check=False, env=given)


def output(name, *arguments, **environment):
    """What the script prints as a command that succeeds."""
    done = command(name, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def module(name):
    """The script as a module."""
    spec = spec_from_loader(name, SourceFileLoader(name, str(ROOT / "scripts" / name)))
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def main(name, *arguments):
    """The script's exit status, run in this process; its children are processes of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        for variable, value in ENVIRONMENT.items():
            patch.setenv(variable, value)
        return int(module(name).main() or 0)


def printed(name, *arguments):
    """What the script prints, run in this process; it must succeed."""
    with redirect_stdout(io.StringIO()) as out:
        assert main(name, *arguments) == 0
    return out.getvalue()

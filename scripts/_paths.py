"""Importing this puts the checkout's packages on the path, in front of installed ones; `ended` runs a command."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "retrieval")]
sys.path[:0] = PACKAGES


def project_environment(threads: int) -> dict[str, str]:
    """The environment of this repository's commands: so many threads, and no options of the user's own."""
    paths = [*PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {
        name: value for name, value in os.environ.items() if name == "KVBLEND_CACHE" or not name.startswith("KVBLEND_")
    }
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)}


def ended(run: Callable[[], int | None]) -> int:
    """The exit code of a command; a mistake ends in one line on standard error."""
    from blend.errors import BlendError

    try:
        return run() or 0
    except BlendError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1

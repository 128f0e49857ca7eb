"""Importing this puts the checkout's packages on the path, in front of installed ones; `ended` runs a command."""

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "retrieval")]


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

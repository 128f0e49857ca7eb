"""Two checkouts' `bench_ttft` in turns: every prefill of one is followed by the same prefill of the other.

Each checkout runs in a process of its own, by its own scripts, and loads its model once. A process works in its turn alone. Its
turn ends where the next prefill (`_ttft.run_once`) begins, so both are hit by what else the machine does.
"""

from __future__ import annotations

import importlib
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

_GRANTS, _REQUESTS = "KVBLEND_TURNS_GRANTS", "KVBLEND_TURNS_REQUESTS"  # file descriptors of a process that takes turns


class Turns:
    """A checkout's process, which waits at each prefill."""

    def __init__(self, checkout: Path, words: Sequence[str], rows: Path) -> None:
        self.checkout = checkout
        self.rows = rows
        grants, self._grant = os.pipe()
        self._request, requests = os.pipe()
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {_GRANTS: str(grants), _REQUESTS: str(requests)}
        script = checkout / "scripts" / "bench_ttft"
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(script), *words, "--json", str(rows)],
            env=environment, pass_fds=(grants, requests), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(grants)
        os.close(requests)

    def take(self) -> bool:
        """Let it work up to its next prefill. False: it has ended."""
        try:
            os.write(self._grant, b"+")
        except BrokenPipeError:
            return False
        return bool(os.read(self._request, 1))

    def wait(self) -> None:
        """Wait for its end. Raises SystemExit when it has measured nothing."""
        code = self._process.wait()
        if not self.rows.exists():
            raise SystemExit(f"{self.checkout}: bench_ttft ended with {code} and no rows; does it have these options?")

    def close(self) -> None:
        """End it, should it still run."""
        os.close(self._grant)
        os.close(self._request)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def rows_in_turns(here: Path, there: Path, words: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of both checkouts' `bench_ttft` with these options. Raises SystemExit when one cannot be run."""
    from _results import Results

    for checkout in (here, there):
        if not (checkout / "scripts" / "_ttft.py").exists():
            raise SystemExit(f"{checkout}: no checkout of kvblend with scripts/_ttft.py")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        processes = []
        for name, checkout in (("here", here), ("there", there)):
            process = Turns(checkout, words, Path(folder) / f"{name}.json")
            stack.callback(process.close)
            processes.append(process)
        working = list(processes)
        while working:
            for process in list(working):
                if not process.take():
                    process.wait()
                    working.remove(process)
        rows, other_rows = (Results(process.rows).rows("ttft") for process in processes)
    return rows, other_rows


def comparison(rows: Sequence[dict[str, Any]], other_rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A table of both, row by row: medians, and the median, least and greatest ratio of two turns that follow each other."""
    from _results import markdown

    names = ("tokens", "store", "method")
    others = {tuple(row[name] for name in names): row for row in other_rows}
    cells = []
    for row in rows:
        key = tuple(row[name] for name in names)
        cells.append([*key, *_compared(row, others[key])] if key in others else [*key, "only here"])
    missing = others.keys() - {tuple(row[name] for name in names) for row in rows}
    cells += [[*key, "only there"] for key in others if key in missing]
    yield from markdown(
        "tokens | store | method | here | there | here / there | least to greatest | notes", cells, names=3
    )


def _compared(row: dict[str, Any], other: dict[str, Any]) -> list[object]:
    if "ttft_s" not in row or "ttft_s" not in other:
        return [row.get("why_not"), other.get("why_not")]
    ratios = [here_s / there_s for here_s, there_s in zip(row["all_s"], other["all_s"], strict=True)]
    wrong = [
        f"WRONG {place}: {each['wrong']}" for place, each in (("here", row), ("there", other)) if each.get("wrong")
    ]
    times = [f"{1e3 * each['ttft_s']:.1f} ms" for each in (row, other)]
    return [*times, f"{median(ratios):.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}", "; ".join(wrong)]


def _run_in_turns(script: Path) -> None:
    """Run a checkout's script in this process, whose prefills wait."""
    sys.path.insert(0, str(script.parent))
    grants, requests = int(os.environ[_GRANTS]), int(os.environ[_REQUESTS])
    _wait(grants)
    importlib.import_module("_paths")
    module = importlib.import_module("_ttft")
    run_once = module.run_once

    @wraps(run_once)
    def in_turn(*arguments: Any, **options: Any) -> Any:
        os.write(requests, b"?")
        _wait(grants)
        return run_once(*arguments, **options)

    module.run_once = in_turn  # type: ignore[attr-defined]
    runpy.run_path(str(script), run_name="__main__")


def _wait(grants: int) -> None:
    if not os.read(grants, 1):
        raise SystemExit("the benchmark that asks in turns has ended")


if __name__ == "__main__":
    sys.path.pop(0)  # the checkout's own scripts take the place of these
    sys.argv = sys.argv[1:]
    _run_in_turns(Path(sys.argv[0]))

"""Measure attention tiles on this GPU and keep the fastest for later processes: `python -m blend_kernels.tune`.

Nothing is measured outside of this command. Without it, calls take the best guesses of `tiles`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from blend_kernels.attention_plain import selective_attention_plain
from blend_kernels.checks import Rule, Work
from blend_kernels.tiles import MOST_LINES, Tile, cache_file, candidates, key_of, save

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Triton's compiler passes fail with a bare RuntimeError of these words; any other RuntimeError is an error of the call.
_PASS_FAILED = "PassManager::run failed"
# Rows of a tile's output that are compared with plain torch, and the largest error of a right one.
_CHECKED_ROWS = 16
_LARGEST_ERROR = 2**-5


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the options describe; status 1 if a tile computed wrong results, 2 without a GPU."""
    options = _options().parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("there is no CUDA GPU here; tiles are measured on one\n")
        return 2
    fastest: dict[str, Tile] = {}
    failed = False
    for work in works(options, torch.device("cuda")):
        key, tiles = kind_of_work(work)
        times = {tile: measured_seconds(work, tile) for tile in tiles}
        failed |= any(math.isnan(seconds) for seconds in times.values())
        sys.stdout.write(f"{key}\n" + "".join(f"  {tile}: {describe(times[tile])}\n" for tile in tiles))
        running = [tile for tile in tiles if math.isfinite(times[tile])]
        if running:
            fastest[key] = min(running, key=times.__getitem__)
    save(fastest)
    sys.stdout.write(f"{len(fastest)} kinds of work in {cache_file()}\n")
    return 1 if failed else 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m blend_kernels.tune", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", type=int, default=32, help="query heads (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--head-dim", type=int, default=128, help="of queries and keys (default: %(default)s)")
    parser.add_argument("--value-dim", type=int, help="default: that of keys")
    parser.add_argument("--keys", type=int, default=16384, help="length of the prompt (default: %(default)s)")
    parser.add_argument("--window", type=int, help="of layers with a sliding window")
    parser.add_argument("--softcap", type=float, help="of the scores")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    return parser


def works(options: argparse.Namespace, device: torch.device) -> Iterator[Work]:
    """One call of each kind: folded rows in powers of two, and last 15 % of all rows."""
    dtype = DTYPES[options.dtype]
    keys = options.keys
    group = options.heads // options.kv_heads
    rule = Rule("exact", options.window, options.softcap, options.head_dim**-0.5)
    k = torch.randn(1, options.kv_heads, keys, options.head_dim, dtype=dtype, device=device)
    value_dim = options.value_dim or options.head_dim
    v = torch.randn(1, options.kv_heads, keys, value_dim, dtype=dtype, device=device)
    powers = range(4, MOST_LINES.bit_length() - 1)
    few_rows = [max(1, (1 << power) // group) for power in powers]
    for rows in (*few_rows, 15 * keys // 100):
        q = torch.randn(1, rows, options.heads, options.head_dim, dtype=dtype, device=device)
        positions = torch.arange(1, rows + 1, device=device) * keys // rows - 1
        yield Work(q.transpose(1, 2), k, v, positions, rule)


def kind_of_work(work: Work) -> tuple[str, tuple[Tile, ...]]:
    """The name of the call's kind on this machine, and the tiles to choose from."""
    from blend_kernels.attention_launch import kind_of, machine

    gpu, kind = machine(work.q.device), kind_of(work)
    return key_of(gpu, kind), candidates(gpu.major, kind.shape)


def describe(seconds: float) -> str:
    """A tile's time, or why it has none."""
    if math.isnan(seconds):
        return "wrong result"
    return f"{1e3 * seconds:.3f} ms" if math.isfinite(seconds) else "does not run"


def measured_seconds(work: Work, tile: Tile) -> float:
    """The time of a tile; NaN if its result is wrong, infinity if it fails to compile or to fit on the GPU."""
    from triton.errors import TritonError

    from blend_kernels.attention_launch import launch_attention, splits_of

    splits = splits_of(work, tile)
    try:
        out, _ = launch_attention(work, tile, splits, False)
    except TritonError:
        return math.inf
    except RuntimeError as error:
        if _PASS_FAILED not in str(error):
            raise
        return math.inf
    assert out is not None
    if not is_right(work, out):
        return math.nan
    return graph_seconds(lambda: launch_attention(work, tile, splits, False))


def is_right(work: Work, out: Tensor) -> bool:
    """Whether some rows of the output equal plain torch, relative to the entry plus the root mean square of its row."""
    assert work.positions is not None
    rows = torch.linspace(0, work.q.shape[2] - 1, _CHECKED_ROWS, device=out.device).long()
    checked = work._replace(q=work.q[:, :, rows], positions=work.positions[rows])
    expected = selective_attention_plain(checked)[0].double()
    root_mean_square = expected.square().mean(-1, keepdim=True).sqrt()
    size = expected.abs() + root_mean_square
    error = (out[:, :, rows].double() - expected).abs()
    return bool((error <= _LARGEST_ERROR * size).all())


def graph_seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Median time of a run on the GPU, without the host's time to launch it.

    The run is captured as a CUDA graph and replayed; before each replay, 256 MiB are written so that L2 holds nothing of it.
    """
    run()  # what compiles or allocates once must not be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    times: list[float] = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        flush.zero_()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())

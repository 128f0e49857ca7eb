"""Rows of results on small corpora, and what they say of each method."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean

from blend.errors import DatasetError
from blend.eval.lines import append_lines, read_lines

# KL beyond which a blend is wrong, in nats, unless plain reuse is beyond it too: then the prompt is hard.
LIMIT = 0.5
METHODS = ("15 %", "5 %", "0 %", "15 %, no map", "reuse")
JUDGED = METHODS[:3]
_LEAST_KL = 1e-6  # what smaller ones count as in a geometric mean


@dataclass(frozen=True, kw_only=True)
class Row:
    """A prompt of a corpus. corpus_chunks, prompt_chunks: tokens of each chunk.

    kl: of the first token from full recompute, in nats, a method. notes: what blends said, where they said anything.
    """

    model: str
    seed: int
    corpus: int
    kind: str
    corpus_chunks: Sequence[int]
    prompt_chunks: Sequence[int]
    kl: Mapping[str, float]
    notes: Mapping[str, Sequence[str]]

    @property
    def worst(self) -> float:
        """The largest KL of the methods that are judged."""
        return max(self.kl[name] for name in JUDGED)

    def beyond(self, method: str) -> bool:
        """Whether the method is beyond the limit where plain reuse is not."""
        return self.kl[method] > LIMIT >= self.kl["reuse"]


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; none where there is no file. Raises `DatasetError` for lines that are no results."""
    names, rows = [field.name for field in fields(Row)], []
    for line in read_lines(path):
        if not line.keys() >= set(names) or not set(METHODS) <= dict(line["kl"]).keys():
            raise DatasetError(f"{path}: a line is no result; name a file that sweep_small_corpora wrote")
        rows.append(Row(**{name: line[name] for name in names}))
    return rows


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Add the rows of one corpus, at once: a stopped run leaves none half measured."""
    append_lines(path, map(asdict, rows))


def failed(rows: Sequence[Row]) -> bool:
    """Whether a judged method is beyond the limit anywhere."""
    return any(row.beyond(name) for row in rows for name in JUDGED)


def by_model(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of each model, in order."""
    found: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.model].append(row)
    return dict(found)


def table(rows: Sequence[Row], worst: int) -> Iterator[str]:
    """A line a method, then so many of the worst prompts."""
    yield f"{'method':<14}{'mean KL':>9}{'geo. mean':>11}{'worst':>9}{'beyond limit, reuse not':>25}{'notes':>7}"
    yield from (_line(name, rows) for name in METHODS)
    for row in sorted(rows, key=lambda row: -row.worst)[:worst]:
        each = ", ".join(f"{name} {row.kl[name]:.3f}" for name in METHODS)
        yield f"  corpus {row.corpus} ({row.kind}) {row.prompt_chunks} of {row.corpus_chunks}: {each}"


def geometric_mean(values: Sequence[float]) -> float:
    """Of values of which the smallest count as 1e-6."""
    return math.exp(mean(math.log(max(value, _LEAST_KL)) for value in values))


def _line(name: str, rows: Sequence[Row]) -> str:
    found = [row.kl[name] for row in rows]
    beyond, noted = sum(row.beyond(name) for row in rows), sum(name in row.notes for row in rows)
    return f"{name:<14}{mean(found):>9.4f}{geometric_mean(found):>11.5f}{max(found):>9.3f}{beyond:>25}{noted:>7}"

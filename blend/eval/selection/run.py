"""Measuring what a file of results lacks; a stopped run goes on where it was."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from blend.errors import ConfigError, DatasetError, PromptError
from blend.eval.dataset import Record
from blend.eval.evaluator import Method
from blend.eval.metrics import word_f1
from blend.eval.selection.methods import Methods, methods
from blend.eval.selection.naming import FULL
from blend.eval.selection.row import Key, Row, append_rows, read_rows, row_of
from blend.eval.selection.workload import APART, Setting, Workload, load_decoder, load_workloads

ROUND = 4  # records of a set before the next set has its turn


@dataclass(frozen=True)
class Shard:
    """Every `count`-th record from number `index`: one of several processes that measure together."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Of "0/2". Raises `ConfigError` for anything else, or an index beyond the count."""
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            raise ConfigError(f"shard is {text!r}; name one as 0/2 and 1/2")
        return cls(int(index), int(count))

    def first(self, sets: int) -> int:
        """Which of so many sets this shard starts at: another than the others, who then find its KV correction."""
        return self.index * sets // self.count


def run(setting: Setting, out: Path, *, group: str, records: int, shard: Shard) -> Iterator[str]:
    """Measure a group of methods on the first so many records of each set; a line on each record when it is in the file.

    What the file holds is not measured again. Raises `DatasetError` where no set has a record to measure, and as `methods`,
    `read_rows`, `load_decoder` and `Workload` do.
    """
    done = {row.key for row in read_rows(out)}
    decoder = load_decoder(setting)
    wanted = methods(group, len(decoder.layers))
    workloads = load_workloads(setting, decoder)
    if not any(workload.records for workload in workloads):
        raise DatasetError(
            f"no set has a record to measure; the last {APART} of each are kept apart, and --task chooses"
        )
    first = shard.first(len(workloads))
    for start in range(0, records, ROUND):
        for workload in (*workloads[first:], *workloads[:first]):
            for index in range(start, min(start + ROUND, records, len(workload.records))):
                if index % shard.count == shard.index:
                    yield from _measure(workload, index, _lacking(workload, index, wanted, done), out)


def _lacking(workload: Workload, index: int, wanted: Methods, done: Collection[Key]) -> Methods:
    """The methods that were not measured on a record."""
    record = workload.records[index]
    return {
        name: config for name, config in wanted.items() if (workload.model, workload.name, record.id, name) not in done
    }


def _measure(workload: Workload, index: int, lacking: Methods, out: Path) -> Iterator[str]:
    """These methods on one record, beside full recompute."""
    record = workload.records[index]
    if not lacking:
        return
    try:
        rows = measured_rows(workload, record, lacking)
    except PromptError as error:
        yield f"{record.id} left out: {error}"
        return
    append_rows(out, rows)
    shown = ", ".join(f"{row.method} {row.kl:.3f}" for row in rows[1:] if row.kl is not None)
    yield f"{workload.name} {index} {record.id} ({rows[0].rows} rows): {shown}"


def measured_rows(workload: Workload, record: Record, wanted: Methods) -> list[Row]:
    """Rows of full recompute and of these methods. Raises `PromptError` for a prompt that does not fit the model."""
    compared = [Method(FULL), *(Method(name, config) for name, config in wanted.items())]
    full, *others = workload.evaluator.measure(record, compared)
    model, name = workload.model, workload.name
    return [row_of(model, name, each, full, word_f1(each.answer, (full.answer,))) for each in (full, *others)]

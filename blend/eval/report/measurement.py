"""One method's answer to one record: what the engine measures and everything else is computed from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# Fields of `Measurement` that judge the answer, in the order of every table.
QUALITY_METRICS = ("f1", "em", "rouge_l", "recall", "kl", "top1")


@dataclass(frozen=True)
class Measurement:
    """One method on one record.

    ttft_s: seconds from the query to the first token's id, retrieval apart. stages: seconds by stage, in order.
    rows_total: rows of the prompt. rows_computed: rows computed summed over layers, over the number of layers, so that
    `rows_computed / rows_total` is the computed share. floor_s: the least time this method could take, None when
    unknown. f1, em, rouge_l: against gold answers, 0 to 1. recall: share of all wanted values. kl: mean KL to the
    reference in nats per answer token. top1: share of answer tokens where both have the same most likely token. None
    means undefined. task: label of the record, to report by.

    Raises `ValueError` for a time that is not positive and finite, a share outside [0, 1], or NaN.
    """

    method: str
    record_id: str
    answer: str
    ttft_s: float
    stages: Mapping[str, float]
    rows_total: int
    rows_computed: float
    floor_s: float | None = None
    f1: float | None = None
    em: float | None = None
    rouge_l: float | None = None
    recall: float | None = None
    kl: float | None = None
    top1: float | None = None
    task: str = ""

    def __post_init__(self) -> None:
        for name in ("ttft_s", "floor_s"):
            self._require(name, lambda value: 0 < value < math.inf, "positive and finite")
        for name in ("f1", "em", "rouge_l", "recall", "top1"):
            self._require(name, lambda value: 0 <= value <= 1, "between 0 and 1")
        self._require("kl", lambda value: value >= 0, "0 or more")
        self._require("rows_computed", lambda value: 0 <= value <= self.rows_total + 1e-6, "between 0 and rows_total")

    def _require(self, name: str, holds: Callable[[float], bool], expected: str) -> None:
        value = getattr(self, name)
        if value is not None and not holds(value):
            raise ValueError(f"{self.method} on record {self.record_id}: {name} must be {expected}, not {value}")

    @property
    def rows_share(self) -> float | None:
        """Share of the prompt's rows that was computed; None for an empty prompt."""
        return self.rows_computed / self.rows_total if self.rows_total else None

    @property
    def floor_ratio(self) -> float | None:
        """Measured time over the floor."""
        return None if self.floor_s is None else self.ttft_s / self.floor_s

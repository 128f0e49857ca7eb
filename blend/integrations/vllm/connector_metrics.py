"""What became of prompts with a ticket, counted in vLLM's scheduler and shown with vLLM's own metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from blend.integrations.vllm.contract import DAMAGED

WORDS = {
    "prompts_blended": "Prompts whose KV came from chunk caches, in part at least.",
    "prompts_uncorrected": "Those of them with more rows recomputed because their caches have no KV correction yet.",
    "fallbacks_cold": "Prompts of which the store held nothing: all rows were computed.",
    "fallbacks_failed": "Prompts whose load failed: vLLM prefilled them.",
    "fallbacks_refused": "Requests whose ticket this vLLM's middleware did not give out: vLLM prefilled them.",
    "rows_prompt": "Rows of prompts that vLLM's own model blended.",
    "rows_recomputed": "Rows of them that were computed.",
    "damaged_entries": "Entries of the store that they found damaged; the log names each.",
}


class Counts(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Since the last time, by the names above."""

    def reset(self) -> None:
        """As its base says."""
        self.data = dict[str, Any]()

    def aggregate(self, other: Counts) -> Counts:
        """Of both."""
        return Counts(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def add(self, name: str, count: int = 1) -> None:
        """Count."""
        self.data[name] = self.data.get(name, 0) + count

    def loaded(self, figures: Iterable[Mapping[str, Any]], failed: int) -> None:
        """Loads have ended. figures: what a stage told of each that did well."""
        self.data = dict(Counter(self.data) + Counter(fallbacks_failed=failed))
        for one in figures:
            self.add("fallbacks_cold" if one.get("reason") == "cold" else "prompts_blended")
            if one.get("uncorrected"):
                self.add("prompts_uncorrected")
            if DAMAGED in one:
                self.add("damaged_entries", one[DAMAGED])
            if "rows" in one:
                self.add("rows_prompt", one["rows"])
                self.add("rows_recomputed", one["rows_computed"])


class Metrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """In vLLM's server. vLLM finds its own metrics by the prefix."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        made = {
            name: self._counter_cls(name=f"vllm:kvblend_{name}", documentation=words, labelnames=self._labelnames)
            for name, words in WORDS.items()
        }
        self._counters = {
            engine: {name: one.labels(*values) for name, one in made.items()}
            for engine, values in self.per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted."""
        for name, count in transfer_stats_data.items():
            self._counters[engine_idx][name].inc(count)

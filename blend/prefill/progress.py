"""How far a prefill is, and which of its rows are final."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from blend.model.cache import BlendedCache
    from blend.prefill.prefill import Prefill
    from blend.quality import Estimate


class FinalRows(NamedTuple):
    """The first rows of a prompt that nothing will change any more, while its prefill runs.

    Attributes:
        cache: of the prompt.
        rows: how many they are.
        exact: how many of the first ones equal full prefill, if the rows from memory do.
        estimate: the expected KL of the whole prompt, if a quality was asked for and there is an estimator.

    """

    cache: BlendedCache
    rows: int
    exact: int
    estimate: Estimate | None


class PrefillProgress:
    """How far an attempt is. Ask it between passes, in the thread that runs them."""

    def __init__(self, prefill: Prefill) -> None:
        self._prefill = prefill

    @property
    def rows_run(self) -> int:
        """Rows computed so far, without those of the question's pass."""
        return self._prefill.ahead_run + self._prefill.chosen_run

    @property
    def rows_to_run(self) -> int:
        """All rows to compute."""
        plan = self._prefill.plan
        return len(plan.ahead) + len(plan.required) + min(plan.budget, len(plan.candidates))

    def final_rows(self) -> FinalRows:
        """The first rows that nothing will change any more; exact ones alone if a KV correction may not fit the others."""
        prefill = self._prefill
        if prefill.chosen_run:
            chosen = prefill.selection.rows[prefill.ahead_run :]
            is_complete = prefill.chosen_run >= len(chosen)
            rows = prefill.prompt.layout.rows if is_complete else int(chosen[prefill.chosen_run])
            exact = min(rows, prefill.plan.exact_rows(chosen.cpu().numpy()))
        else:
            rows = exact = prefill.prompt.beginning.tokens + prefill.ahead_run
        if rows > exact and not prefill.check.is_passed_by(rows):
            rows = exact
        return FinalRows(prefill.cache, rows, exact, prefill.estimate)

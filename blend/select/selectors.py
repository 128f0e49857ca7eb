"""The built-in selectors.

- `query_guided`: rows that the question attends to over the stored caches.
- `hkvd`, `gradual`: rows whose KV differs most in context (CacheBlend, Yao et al. 2025, section 4), at one layer or at several.
- `mixed`: deviation and attention together.
- `first_k`: the first rows of every chunk after the first, where isolated chunks grow attention sinks (EPIC, Hu et al. 2025).
- `random`, `all`, `none`: controls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from blend.errors import ConfigError
from blend.ranges import check_fields
from blend.select.base import (
    KV,
    Evidence,
    Needs,
    QueryScore,
    Selector,
    Step,
    best_chunks,
    checked_rows,
    parsed,
    top_candidates,
)
from blend.text import shown

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ScoringSelector(Selector):
    """A selector that scores every row and takes the best.

    lead: rows at the start of every chunk that are taken first, up to half of the budget; None is the selector's own. A
    chunk opens with its title: answers copy it, the question does not attend to it, and its KV differs most.
    """

    own_lead: ClassVar[int] = 0

    lead: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)

    def allot(self, scores: Tensor, evidence: Evidence) -> Tensor:
        """The `budget` best candidates by scores `[candidates]` and by this selector's rules, sorted by position."""
        if evidence.whole_chunks:
            return best_chunks(scores, evidence)
        lead = self.own_lead if self.lead is None else self.lead
        if lead:
            scores = _leads_first(scores, evidence, lead)
        return top_candidates(scores, evidence)


def _leads_first(scores: Tensor, evidence: Evidence, lead: int) -> Tensor:
    """Scores with the first rows of every chunk above all others."""
    starts = evidence.layout.chunk_starts(evidence.candidates)
    depth = (evidence.budget // 2 // _chunks_among(starts)).clamp_max(lead)
    return scores.masked_fill(evidence.candidates - starts < depth, float("inf"))


def _chunks_among(starts: Tensor) -> Tensor:
    """How many chunks begin at these sorted starts, one at least, as a tensor: the host does not wait for it."""
    return (starts[1:] != starts[:-1]).sum() + 1


LEAD = 6  # rows of every chunk, measured in docs/study.md


@dataclass(frozen=True)
class QueryGuided(ScoringSelector):
    """Rows with the most attention from the question over the stored caches, summed over a band of layers.

    Known before any layer is recomputed. layers: see `QueryScore`.
    """

    name: ClassVar[str] = "query_guided"
    takes_whole_chunks: ClassVar[bool] = True
    own_lead: ClassVar[int] = LEAD

    layers: str = "middle"

    def needs(self, layers: int) -> Needs:
        """The query's attention at the band's layers."""
        return Needs(query=QueryScore(self.layers))

    def select(self, evidence: Evidence) -> Tensor:
        """The rows that the query attends to most."""
        assert evidence.query_attention is not None
        return self.allot(evidence.query_attention.sum(0), evidence)


DeviationOf = Literal["v", "k", "kv"]


@dataclass(frozen=True)
class HighDeviation(ScoringSelector):
    """Rows with the largest distance between fresh and stored KV at the check layer.

    of: values, keys or both. The distance is squared, summed over heads and dimensions.
    """

    name: ClassVar[str] = "hkvd"

    check_layer: int = 1
    of: DeviationOf = "v"

    def needs(self, layers: int) -> Needs:
        """The check layer."""
        return Needs(self.check_layer)

    def select(self, evidence: Evidence) -> Tensor:
        """The rows that deviate most."""
        return self.allot(seen_deviation(evidence, self.of), evidence)


GRADUAL_STEPS = 4  # narrowings cost a QKV projection each


@dataclass(frozen=True)
class Gradual(HighDeviation):
    """As hkvd, with more rows at first, of which those that deviate least are dropped at later layers.

    The gradual filtering of CacheBlend (Yao et al. 2025, arXiv 2405.16444, section 4.3): deviation is measured again at each
    step, over the rows that are still computed. From the check layer on, the layers compute the budget on average.

    first: rows that are kept at the check layer, in budgets.
    """

    name: ClassVar[str] = "gradual"

    first: float = 1.5

    def needs(self, layers: int) -> Needs:
        """The check layer and up to three more, an eighth of the depth apart, where the rows decrease evenly."""
        above = layers - self.check_layer
        places = range(self.check_layer, layers, max(1, above // 8))[:GRADUAL_STEPS]
        if len(places) < 2:
            return Needs(self.check_layer)
        weights = [1 - step / (len(places) - 1) for step in range(len(places))]  # of `first`, the others of `last`
        mean_weight = sum(weights) * places.step / above
        last = (1 - self.first * mean_weight) / (1 - mean_weight)
        steps = [
            Step(place, last + (self.first - last) * weight) for place, weight in zip(places, weights, strict=True)
        ]
        return Needs(self.check_layer, factor=self.first, later=tuple(steps[1:]))


def seen_deviation(evidence: Evidence, of: DeviationOf) -> Tensor:
    """Distance of fresh from stored KV at the step's layer, fp32 `[candidates]`."""
    assert evidence.fresh is not None
    assert evidence.stored is not None
    return deviation(evidence.fresh, evidence.stored, of)


def deviation(fresh: KV, stored: KV, of: DeviationOf) -> Tensor:
    """Squared distance of each row's keys and values `[1, kv_heads, rows, head_dim]` from the stored ones, fp32 `[rows]`."""
    import torch

    distances = []
    for name, new, old in zip("kv", fresh, stored, strict=True):
        if name in of:
            difference = new[0].float() - old[0].float()
            distances.append(torch.linalg.vecdot(difference, difference).sum(0))
    return torch.stack(distances).sum(0)


@dataclass(frozen=True)
class Mixed(ScoringSelector):
    """Rows with the highest product of KV deviation at a check layer and query attention.

    check_layer, of: deviation, as `HighDeviation` measures it. layers: attention, as `QueryScore` says.
    """

    name: ClassVar[str] = "mixed"

    check_layer: int = 1
    of: DeviationOf = "v"
    layers: str = "middle"

    def needs(self, layers: int) -> Needs:
        """The check layer, and the query's attention at the band's layers."""
        return Needs(self.check_layer, QueryScore(self.layers))

    def select(self, evidence: Evidence) -> Tensor:
        """The rows with the highest product."""
        assert evidence.query_attention is not None
        deviation = seen_deviation(evidence, self.of)
        return self.allot(deviation * evidence.query_attention.sum(0), evidence)


@dataclass(frozen=True)
class FirstK(Selector):
    """The first k rows of each chunk after the first, as many as the budget allows.

    k: rows per chunk at most; None spends the whole budget evenly.
    """

    name: ClassVar[str] = "first_k"

    k: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def select(self, evidence: Evidence) -> Tensor:
        """Row 0 of every chunk after the first, then row 1 of every chunk, until budget or k is reached."""
        starts = evidence.layout.chunk_starts(evidence.candidates)
        depth = evidence.candidates - starts
        eligible = starts > evidence.layout.context.start
        if self.k is not None:
            eligible &= depth < self.k
        rows = evidence.candidates[eligible]
        depth = depth[eligible]
        order = depth.argsort(stable=True)[: evidence.budget]
        return rows[order].sort().values


@dataclass(frozen=True)
class All(Selector):
    """Every row, whatever the budget: full recompute after the prefix."""

    name: ClassVar[str] = "all"
    takes_whole_chunks: ClassVar[bool] = True

    def select(self, evidence: Evidence) -> Tensor:
        """All candidates."""
        return evidence.candidates


@dataclass(frozen=True)
class Nothing(Selector):
    """No row, whatever the budget: plain reuse."""

    name: ClassVar[str] = "none"
    takes_whole_chunks: ClassVar[bool] = True

    def select(self, evidence: Evidence) -> Tensor:
        """No candidate."""
        return evidence.candidates[:0]


@dataclass(frozen=True)
class Random(Selector):
    """Uniformly random rows; the same ones for the same seed and prompt length."""

    name: ClassVar[str] = "random"

    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)

    def select(self, evidence: Evidence) -> Tensor:
        """`budget` random candidates."""
        import torch

        generator = torch.Generator().manual_seed(int(self.seed))
        candidates = evidence.candidates
        order = torch.randperm(candidates.shape[0], generator=generator)
        chosen = order[: evidence.budget].sort().values
        return candidates[chosen.to(candidates.device)]


SELECTORS: dict[str, type[Selector]] = {
    kind.name: kind for kind in (HighDeviation, Gradual, QueryGuided, Mixed, FirstK, Random, All, Nothing)
}
"""The built-in selectors by the names that specs have for them. `tests/select` holds each of them to the contract."""


def rows_of(selector: Selector, evidence: Evidence) -> Tensor:
    """The rows that a selector chooses, sorted.

    Raises `ConfigError` if a selector that is not in `SELECTORS` breaks the contract of `Selector.select`. Those in it are
    checked by tests instead: on a GPU each look at the rows waits for them.
    """
    if type(selector) in SELECTORS.values():
        return selector.select(evidence)
    return checked_rows(selector, evidence)


def make_selector(spec: str | Selector) -> Selector:
    """The selector that a spec describes, `NAME` or `NAME:key=value,key=value` (`parameters`); a selector as it is.

    Raises `ConfigError` in one line for a name, a key or a value that is not known, with those that are.
    """
    if isinstance(spec, Selector):
        return spec
    if not isinstance(spec, str):
        raise ConfigError(f"selector is {shown(spec)}; give a name, NAME:key=value,key=value or a blend.Selector")
    name, colon, text = spec.partition(":")
    if name not in SELECTORS:
        raise ConfigError(f"unknown selector {shown(name)}; choose one of {', '.join(SELECTORS)}")
    kind = SELECTORS[name]
    arguments = parsed(kind, name, text) if colon else {}
    try:
        return kind(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def require_whole_chunks(selector: Selector) -> None:
    """Raise `ConfigError` for a selector that chooses single rows: recurrent layers compute whole chunks or their leads."""
    if not selector.takes_whole_chunks:
        able = ", ".join(name for name, kind in SELECTORS.items() if kind.takes_whole_chunks)
        raise ConfigError(
            f"selector {selector.spec} chooses single rows, which a model with recurrent layers cannot compute; use {able}"
        )

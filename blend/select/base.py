"""The contract of a selector: which cached context rows are worth recomputing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from blend.errors import ConfigError
from blend.limits import check_fields
from blend.select.parameters import spec_of
from blend.select.query_score import QueryScore

if TYPE_CHECKING:
    import torch

    from blend.types import PromptLayout

KV: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


@dataclass(frozen=True)
class Step:
    """Go on with fewer rows from `layer` on: `factor` times the budget. Before the first step all rows run."""

    layer: int
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Needs:
    """What a selector must see before it can choose, so that loading and compute can be planned around it.

    steps: where it chooses, one or more, in order of layers. A step at layer 0 costs nothing before it; one at
    layer n > 0 lets the layers below run on all rows still there, and layer n's QKV projection. query: how the query rows, run
    once over the stored caches, score the context rows; None when they need not run. truth: full recompute, for research.
    """

    steps: tuple[Step, ...] = (Step(0),)
    query: QueryScore | None = None
    truth: bool = False

    def __post_init__(self) -> None:
        layers = [step.layer for step in self.steps]
        if not layers or layers != sorted(set(layers)):
            raise ConfigError(f"steps at layers {layers}: a selector chooses at one layer or more, in ascending order")


@dataclass(frozen=True)
class Evidence:
    """What a selector may look at, at one of its steps.

    layout: the prompt. candidates: sorted positions of the context rows that came out of the store and are still there, int64
    `[candidates]`. budget: how many of them to return. layer: the step's layer. fresh, stored: keys and values of that layer at
    the candidates, `[1, kv_heads, candidates, head_dim]`, computed in context and repositioned from the store; None at layer 0.
    query_attention: attention that the query rows give each candidate, as the needs say, fp32 `[layers, candidates]`.
    truth: true deviation weighted by true attention, see `evidence.true_weight`, fp32 `[candidates]`.
    """

    layout: PromptLayout
    candidates: torch.Tensor
    budget: int
    layer: int = 0
    fresh: KV | None = None
    stored: KV | None = None
    query_attention: torch.Tensor | None = None
    truth: torch.Tensor | None = None


class Selector(ABC):
    """Chooses rows. One object may serve several prompts at once, in several threads.

    name: what it is called in reports; without one, the name of its class.
    """

    name: ClassVar[str] = ""

    @property
    def spec(self) -> str:
        """Name and parameters in one line, which reports show; `make_selector` reads that of a built-in selector back.

        The parameters are the fields of a dataclass that are not at their defaults.
        """
        return spec_of(self)

    def needs(self, layers: int) -> Needs:
        """What it must see, for a decoder of so many layers. Raises `ConfigError` when that decoder is too shallow for it."""
        return Needs()

    @abstractmethod
    def select(self, evidence: Evidence) -> torch.Tensor:
        """At most `evidence.budget` of `evidence.candidates`, each once, int64 `[rows]` in any order."""


def top_candidates(scores: torch.Tensor, evidence: Evidence) -> torch.Tensor:
    """The `budget` candidates with the highest scores `[candidates]`, sorted by position; ties go to the earlier row."""
    order = scores.argsort(descending=True, stable=True)[: evidence.budget]
    return evidence.candidates[order.sort().values]

"""The contract of a selector, which decides which cached context rows to recompute, and its text form.

A spec is `NAME` or `NAME:key=value,key=value` with the fields of the selector's dataclass. Numbers are written as in Python,
layers joined by a plus sign (`layers=3+7+12-15`), "chosen by the selector" as auto. Fields at their defaults are left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args, get_origin, get_type_hints

from blend.errors import ConfigError
from blend.ranges import LAYERS_IN_WORDS, NUMBERS, check_fields, check_number, numbered_layers
from blend.text import shown

if TYPE_CHECKING:
    from torch import Tensor

    from blend.layout import PromptLayout


@dataclass(frozen=True)
class QueryScore:
    """How the question's attention scores a context row. Raises `ConfigError` for other values.

    layers: the scoring layers, see `scoring_layers`.
    """

    layers: str = "middle"

    def __post_init__(self) -> None:
        check_fields(self)


def scoring_layers(name: str, layers: Sequence[int]) -> tuple[int, ...]:
    """Layers by name: "all", "middle" (half to five sixths of them), "upper" (from half on), or by number ("3+7+12-15").

    layers: indices of the decoder's layers with attention. Raises `ConfigError` for another name or another layer.
    """
    count = len(layers)
    half = count // 2
    bands = {"all": layers, "middle": layers[half : -(-5 * count // 6)], "upper": layers[half:]}
    chosen = tuple(bands[name]) if name in bands else numbered_layers(name)
    if not chosen or not set(chosen) <= set(layers):
        among = f"below {count}" if count > layers[-1] else f"among {', '.join(map(str, layers))}"
        raise ConfigError(f"layers is {shown(name)}; choose {LAYERS_IN_WORDS}, {among}")
    return chosen


AUTO = "auto"

MEANINGS = {
    "layers": "layers at which the question's attention scores rows",
    "check_layer": "layer at which deviation is measured",
    "of": "deviation of values, of keys, or of both",
    "first": "rows that are kept at the check layer, in budgets; fewer at later layers",
    "k": "most rows a chunk; auto spends the whole budget",
    "seed": "seed of the random numbers",
    "lead": "rows at the start of every chunk that are taken first; auto is 6 for query_guided, else 0",
}
"""What every parameter means; the same in all selectors that have it."""


def parameters(kind: type) -> tuple[Field[Any], ...]:
    """The fields of a selector's class, its own before the shared ones."""
    if not is_dataclass(kind):
        return ()
    return tuple(sorted(fields(kind), key=lambda field: field.kw_only is True))


def allowed(kind: type, name: str) -> str:
    """The allowed values of a selector's parameter, in words."""
    annotation = get_type_hints(kind)[name]
    if name in NUMBERS:
        return NUMBERS[name].span
    if get_origin(annotation) is Literal:
        return ", ".join(get_args(annotation))
    return LAYERS_IN_WORDS


def defaults(kind: type) -> str:
    """The default parameters of a selector's class, as in a spec."""
    return ", ".join(f"{field.name}={written(field.default)}" for field in parameters(kind))


def summary(kind: type) -> str:
    """What a selector's class does, in one line."""
    return (kind.__doc__ or "").partition("\n")[0].rstrip(".")


def spec_of(selector: Selector) -> str:
    """The spec of a selector: its name and those parameters that are texts, numbers or switches."""
    name = selector.name or type(selector).__name__
    values = [(field, getattr(selector, field.name)) for field in parameters(type(selector))]
    texts = [
        f"{field.name}={written(value)}"
        for field, value in values
        if isinstance(value, str | Real | None) and (field.default is MISSING or value != field.default)
    ]
    return f"{name}:{','.join(texts)}" if texts else name


def written(value: object) -> str:
    """A value as in a spec."""
    if value is None:
        return AUTO
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral):
        return str(int(value))
    return repr(float(value)).removesuffix(".0") if isinstance(value, Real) else str(value)


def parsed(kind: type, name: str, text: str) -> dict[str, Any]:
    """Constructor arguments from the part of a spec after the colon. Raises `ConfigError`."""
    fields_by_name = {field.name: field for field in parameters(kind)}
    arguments: dict[str, Any] = {}
    for pair in text.split(","):
        key, sign, value = pair.partition("=")
        if not fields_by_name:
            raise ConfigError(f"{name} takes no parameters; leave out {shown(':' + text)}")
        if not sign:
            joined = "; layers are joined by +" if "layers" in fields_by_name else ""
            raise ConfigError(f"{name}: {shown(pair)} is not KEY=VALUE{joined}; it takes {', '.join(fields_by_name)}")
        if key not in fields_by_name:
            raise ConfigError(f"{name} has no parameter {shown(key)}; choose among {', '.join(fields_by_name)}")
        if key in arguments:
            raise ConfigError(f"{name}: {key} is given twice")
        arguments[key] = _value(name, fields_by_name[key], value)
    return arguments


def _value(name: str, field: Field[Any], text: str) -> Any:
    """One parsed value; the class itself checks texts."""
    if text == AUTO and field.default is None:
        return None
    try:
        if field.name in NUMBERS:
            return NUMBERS[field.name].parsed(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {field.name}: {error}") from None
    return text


KV: TypeAlias = "tuple[Tensor, Tensor]"


@dataclass(frozen=True)
class Step:
    """One choice of a selector: from `layer` on, `factor` times the budget of rows is computed. Raises `ConfigError`."""

    layer: int
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Needs:
    """What a selector must see before it can choose, so that loading and compute can be planned.

    Attributes:
        check_layer: Where it chooses first. Layer 0 costs nothing; a higher one runs the layers below, and its own QKV
            projection, on all rows.
        query: How the query rows, run once over the stored caches, score the context rows. None if they need not run.
        later: Where it chooses again, by ascending layer, among the rows that are still computed.
        factor: How many budgets of rows it keeps at `check_layer`.

    Raises:
        ConfigError: There is no such layer, or the layers do not ascend.

    Examples:
        >>> Needs(check_layer=1, factor=1.5, later=(Step(4), Step(8, 0.5))).steps
        (Step(layer=1, factor=1.5), Step(layer=4, factor=1.0), Step(layer=8, factor=0.5))
    """

    check_layer: int = 0
    query: QueryScore | None = None
    later: tuple[Step, ...] = ()
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_number("layer", self.check_layer)
        check_number("factor", self.factor)
        layers = [step.layer for step in self.steps]
        if layers != sorted(set(layers)):
            raise ConfigError(
                f"a selector chooses at layers {', '.join(map(str, layers))}; give them in ascending order"
            )

    @property
    def steps(self) -> tuple[Step, ...]:
        """All its choices, by ascending layer."""
        return (Step(self.check_layer, self.factor), *self.later)


@dataclass(frozen=True)
class Evidence:
    """What a selector sees at one of its steps.

    Attributes:
        layout: The prompt.
        candidates: Sorted positions of the context rows that came from the store and are still computed, int64 `[candidates]`.
        budget: How many rows to return.
        layer: The layer of the step.
        fresh: Keys and values of that layer at the candidates, computed in context, `[1, kv_heads, candidates, head_dim]`.
            None at layer 0.
        stored: The same from the store, repositioned. None at layer 0.
        query_attention: Attention that the query rows give each candidate, fp32 `[layers, candidates]`, if needed.
        whole_chunks: Whether only all candidates of a chunk, or none, can be recomputed.
    """

    layout: PromptLayout
    candidates: Tensor
    budget: int
    layer: int = 0
    fresh: KV | None = None
    stored: KV | None = None
    query_attention: Tensor | None = None
    whole_chunks: bool = False


class Selector(ABC):
    """Chooses which cached context rows to recompute. One object may serve several prompts at once, in several threads.

    >>> from dataclasses import dataclass
    >>> from blend import BlendConfig, Evidence, Selector
    >>> @dataclass(frozen=True)
    ... class Last(Selector):
    ...     name = "last"
    ...     def select(self, evidence: Evidence):
    ...         return evidence.candidates[-evidence.budget :]
    >>> BlendConfig(Last(), ratio=0.1).plain()["selector"]
    'last'

    Attributes:
        name: Its name in specs and reports; by default the name of its class.
        takes_whole_chunks: Whether it can choose whole chunks (`Evidence.whole_chunks`), as recurrent layers need it.
    """

    name: ClassVar[str] = ""
    takes_whole_chunks: ClassVar[bool] = False

    @property
    def spec(self) -> str:
        """Name and non-default dataclass fields in one line. `make_selector` reads a built-in selector's spec back."""
        return spec_of(self)

    def needs(self, layers: int) -> Needs:
        """What it must see before it can choose.

        Args:
            layers: The number of the decoder's layers.

        Returns:
            The evidence that it needs; by default none.

        Raises:
            ConfigError: The decoder has too few layers.
        """
        return Needs()

    @abstractmethod
    def select(self, evidence: Evidence) -> Tensor:
        """Choose the rows to recompute.

        Args:
            evidence: What the selector may look at.

        Returns:
            At most `evidence.budget` of `evidence.candidates`, each once, int64 `[rows]` in any order.
        """


def top_candidates(scores: Tensor, evidence: Evidence) -> Tensor:
    """The `budget` candidates with the highest scores `[candidates]`, sorted by position. Ties go to the earlier row."""
    order = scores.argsort(descending=True, stable=True)[: evidence.budget]
    return evidence.candidates[order.sort().values]


def best_chunks(scores: Tensor, evidence: Evidence) -> Tensor:
    """All candidates of the chunks with the highest sums of scores `[candidates]` that fit the budget, sorted."""
    import torch

    chunk_starts = evidence.layout.chunk_starts(evidence.candidates)
    starts, which = torch.unique(chunk_starts, return_inverse=True)
    sums = scores.new_zeros(starts.shape[0]).index_add_(0, which, scores)
    sizes = torch.bincount(which).tolist()
    room = evidence.budget
    taken = torch.zeros_like(which, dtype=torch.bool)
    for chunk in sums.argsort(descending=True, stable=True).tolist():
        if sizes[chunk] <= room:
            room -= sizes[chunk]
            taken |= which == chunk
    return evidence.candidates[taken]


def needs_of(selector: Selector, layers: int) -> Needs:
    """The checked needs of a selector for a decoder with KV in its first `layers` layers. Raises `ConfigError`."""
    needs = selector.needs(layers)
    if not isinstance(needs, Needs):
        raise ConfigError(f"selector {selector.spec}: its needs are {shown(needs)}; return a blend.Needs")
    last = needs.steps[-1].layer
    if last >= layers:
        raise ConfigError(
            f"selector {selector.spec}: layer {last} has no KV: the model keeps KV in layers 0 to {layers - 1}"
        )
    return needs


def checked_rows(selector: Selector, evidence: Evidence) -> Tensor:
    """The rows that a selector chooses, sorted. Raises `ConfigError` if it breaks the contract of `Selector.select`."""
    candidates = evidence.candidates.clone()  # a selector may change its evidence
    chosen = selector.select(evidence)
    if wrong := _broken(chosen, candidates, evidence.budget):
        raise ConfigError(f"selector {selector.spec}: it returned {wrong}")
    return chosen.to(candidates.device).sort().values


def _broken(chosen: object, candidates: Tensor, budget: int) -> str:
    """What breaks the contract in what a selector returned; empty if nothing does."""
    import torch

    if not isinstance(chosen, torch.Tensor):
        return f"{shown(chosen)}; return int64 positions in a tensor `[rows]`"
    if chosen.dtype != torch.int64 or chosen.dim() != 1:
        kind = str(chosen.dtype).removeprefix("torch.")
        return f"a tensor of {kind} {list(chosen.shape)}; return int64 positions in a tensor `[rows]`"
    rows = chosen.to(candidates.device).sort().values
    if rows.shape[0] > budget:
        return f"{rows.shape[0]} rows where the budget is {budget}; return at most evidence.budget"
    twice = rows[1:][rows[1:] == rows[:-1]]
    if twice.shape[0]:
        return f"row {int(twice[0])} twice; return every row once"
    foreign = rows[~torch.isin(rows, candidates)]
    if foreign.shape[0]:
        return f"row {int(foreign[0])}, which is no candidate; return rows of evidence.candidates, not indices into it"
    return ""

"""Selectors: which cached context rows to recompute. One file each, one contract (`base.Selector`), one factory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from blend.config import BlendConfig
from blend.errors import ConfigError

if TYPE_CHECKING:
    from blend.select.allotment import Allotment
    from blend.select.base import Selector

__all__ = ["SELECTORS", "make_selector"]

QUERY_GUIDED_LEAD = 6  # rows of a chunk's head that `query_guided` takes first, if it takes single rows (docs/study.md)


def _allotment(config: BlendConfig, head: int = 0) -> Allotment:
    """As configured; head: the selector's own, where the configuration leaves it to the selector."""
    from blend.select.allotment import Allotment

    return Allotment(config.block, head if config.chunk_lead is None else config.chunk_lead, config.chunk_floor)


def _hkvd(config: BlendConfig) -> Selector:
    from blend.select.base import Step
    from blend.select.hkvd import HighDeviation

    return HighDeviation((Step(config.check_layer),), config.deviation_of, config.norm, _allotment(config))


def _gradual(config: BlendConfig) -> Selector:
    from blend.select.hkvd import GradualDeviation

    return GradualDeviation(config.check_layer, config.deviation_of, config.norm, _allotment(config))


def _query_guided(config: BlendConfig) -> Selector:
    from blend.select.query_guided import QueryGuided
    from blend.select.query_score import QueryScore

    head = QUERY_GUIDED_LEAD if config.block == 1 else 0
    return QueryGuided(QueryScore.of(config), _allotment(config, head))


def _mixed(config: BlendConfig) -> Selector:
    from blend.select.hkvd import HighDeviation
    from blend.select.mixed import Mixed
    from blend.select.query_score import QueryScore

    return Mixed(
        HighDeviation((), config.deviation_of, config.norm),
        QueryScore.of(config),
        config.check_layer,
        rule=config.rule,
        prefilter=config.prefilter,
        allotment=_allotment(config),
    )


def _first_k(config: BlendConfig) -> Selector:
    from blend.select.first_k import FirstK

    return FirstK(config.first_k)


def _random(config: BlendConfig) -> Selector:
    from blend.select.controls import Random

    return Random(config.seed)


def _oracle(config: BlendConfig) -> Selector:
    from blend.select.oracle import Oracle

    return Oracle(_allotment(config))


def _all(config: BlendConfig) -> Selector:
    from blend.select.controls import All

    return All()


def _none(config: BlendConfig) -> Selector:
    from blend.select.controls import Nothing

    return Nothing()


SELECTORS: dict[str, Callable[[BlendConfig], Selector]] = {
    "hkvd": _hkvd,
    "gradual": _gradual,
    "query_guided": _query_guided,
    "mixed": _mixed,
    "first_k": _first_k,
    "random": _random,
    "oracle": _oracle,
    "all": _all,
    "none": _none,
}


def make_selector(config: BlendConfig) -> Selector:
    """The selector that a configuration names. Raises `ConfigError` for an unknown name."""
    if config.selector not in SELECTORS:
        raise ConfigError(f"unknown selector {config.selector!r}; choose one of {', '.join(SELECTORS)}")
    return SELECTORS[config.selector](config)

"""Few combinations of many options: every pair of values of two options occurs in at least one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Chosen = dict[str, Any]


def covering(options: Mapping[str, Sequence[Any]]) -> list[Chosen]:
    """Combinations such that any two values of two options meet: a fault of a compiler rarely takes more than two.

    Greedy: each starts with the first pair that has not met, then gives every other option the value that meets the most.
    """
    combined: list[Chosen] = []
    missing = dict.fromkeys(
        ((a, x), (b, y))
        for a, b in combinations(options, 2)
        for x, y in product(range(len(options[a])), range(len(options[b])))
    )
    while missing:
        chosen = dict(next(iter(missing)))
        for name, values in options.items():
            if name not in chosen:
                chosen[name] = max(range(len(values)), key=lambda i: _met(missing, chosen, options, name, i))
        for pair in combinations([(name, chosen[name]) for name in options], 2):
            missing.pop(pair, None)
        combined.append({name: options[name][chosen[name]] for name in options})
    return combined


def _met(
    missing: Mapping[Any, None], chosen: Chosen, options: Mapping[str, Sequence[Any]], name: str, value: int
) -> int:
    """How many missing pairs this value of one option makes with what is chosen."""
    order = list(options)
    values = [((name, value), (option, i)) for option, i in chosen.items()]
    return sum(tuple(sorted(pair, key=lambda p: order.index(p[0]))) in missing for pair in values)

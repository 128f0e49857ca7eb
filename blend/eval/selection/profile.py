"""Layers judged by the rows that they find: how much of what stale rows cost the question lies in a layer's choice of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean

from blend.chunks.assemble import assemble, place
from blend.eval.dataset import Record
from blend.eval.selection.workload import Setting, Workload, load_decoder, load_workloads
from blend.recompute import make_plan
from blend.select import Nothing, QueryScore
from blend.select.evidence import query_attention, true_weight

BUDGET = 0.15  # share of the stale rows


def profile(setting: Setting, records: int) -> Iterator[str]:
    """A line of shares a set, their mean, and the best third of the layers as an option.

    records: of each set, taken from those that `run` does not measure.
    """
    shares = []
    for workload in load_workloads(setting, load_decoder(setting)):
        several = [record for record in workload.apart if len(record.chunks) > 1]  # alone, a chunk costs nothing
        shares.append(_means([layer_shares(workload, record) for record in several[:records]]))
        yield _line(workload.name, shares[-1])
    overall = _means(shares)
    yield _line("mean", overall)
    yield f"--selector query_guided:layers={'+'.join(map(str, best_layers(overall)))}"


def best_layers(shares: Sequence[float]) -> list[int]:
    """The third of the layers with the highest shares, at least one, in order."""
    return sorted(sorted(range(len(shares)), key=shares.__getitem__)[-max(1, len(shares) // 3) :])


def layer_shares(workload: Workload, record: Record) -> list[float]:
    """Of the cost that a budget of rows can hold, the share that rows chosen by each layer alone hold, `[layers]`."""
    evaluator = workload.evaluator
    blender, decoder = evaluator.blender, evaluator.decoder
    layout = evaluator.template.layout(record.question, record.chunks)
    evaluator.cache_chunks(layout)
    library = blender.library(layout.kept_behind)
    placed = place(layout, library.open_sound, contextual=True)
    of_chunks = blender.corrections(placed).of_chunks
    cache = assemble(decoder, layout, blender.encoder(layout.prefix).prefix, placed.readers, of_chunks).cache
    plan = make_plan(layout, placed.hits, Nothing(), 0.0, decoder.device, first_exact=placed.first_exact)
    cost = true_weight(decoder, cache, layout)[plan.stale]
    scores = query_attention(decoder, cache, layout, QueryScore("all"))[:, plan.stale]
    budget = max(1, round(BUDGET * len(cost)))
    held = cost[scores.topk(budget).indices].sum(1) / cost.topk(budget).values.sum()
    return [float(share) for share in held]


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Mean of each column."""
    return [mean(column) for column in zip(*rows, strict=True)]


def _line(name: str, shares: Sequence[float]) -> str:
    return f"{name:<18}" + " ".join(f"{share:.2f}" for share in shares)

"""What is told of a prompt when its prefill is done, or was left to somebody else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from blend.serve.engine import Started

if TYPE_CHECKING:
    from blend.blender import Blend
    from blend.serve.engine import Work


def started(
    work: Work, blend: Blend, *, reused: tuple[int, int], reason: str, waited_s: float, ttft_s: float
) -> Started:
    """Of a prompt that was blended, or computed in full for this `reason`; see `Started`.

    reused: rows that were taken over from earlier prompts, and how many of them are not exact.
    """
    stored = zip(work.layout.stored, _hits(work, blend), strict=True)
    return Started(
        hits=tuple(hit for chunk, hit in stored if chunk is not None),
        rows=work.layout.rows,
        rows_computed=blend.rows_recomputed,
        rows_reused=reused[0],
        rows_inexact=reused[1],
        bytes_loaded=blend.bytes_loaded,
        lacking=len(blend.missing),
        reason=reason,
        stages=blend.stages,
        waited_s=waited_s,
        ttft_s=ttft_s,
        notes=blend.notes,
        trace=_traced(blend) if work.trace else (),
        problems=(*blend.problems, *blend.artifact_problems),
    )


def declined(work: Work, *, reason: str, waited_s: float, ttft_s: float) -> Started:
    """Of a prompt of which nothing was computed for this `reason`."""
    hits = (False,) * sum(chunk is not None for chunk in work.layout.stored)
    return Started(hits, work.layout.rows, work.layout.rows, 0, 0, 0, 0, reason, {}, waited_s, ttft_s, ())


def _hits(work: Work, blend: Blend) -> list[bool]:
    """For each place of the prompt whether its KV was there; those before what is known are."""
    covered = len(work.layout.chunks) - len(blend.layout.chunks)
    return [True] * covered + list(blend.hits)


def _traced(blend: Blend) -> tuple[tuple[bool, float | None], ...]:
    computed = torch.zeros(blend.layout.rows, dtype=torch.bool)
    computed[blend.selection.rows.cpu()] = True
    scores: list[float | None] = [None] * blend.layout.rows
    if blend.selection.scores is not None:
        scores = [*blend.selection.scores.tolist()]
    return tuple(zip(computed.tolist(), scores, strict=True))

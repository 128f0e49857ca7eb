"""Judges by audits whether a corpus keeps the quality that requests ask for."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from cachetools import LRUCache

from blend.compare import ComparedAnswer, compare
from blend.intervals import LEAST_SAMPLE, Judged
from blend.quality import Quality
from blend.serve.events import Audit, Promise
from blend.serve.failures import LOG

_MOST_CORPORA = 1024
_JUDGED_AUDITS = 256  # of a corpus


class Promises:
    """Judges each corpus by its audits, and logs when that changes."""

    def __init__(self) -> None:
        self._audits: LRUCache[tuple[str, str], deque[Audit]] = LRUCache(_MOST_CORPORA)
        self._broken = set[tuple[str, str]]()

    def judged(self, audit: Audit) -> Audit:
        """The audit with its corpus's promise, this audit included."""
        if audit.quality is None or audit.kl is None:
            return audit
        corpus = audit.tenant, audit.corpus
        audits = self._audits.setdefault(corpus, deque(maxlen=_JUDGED_AUDITS))
        audits.append(audit)
        promise = promise_of(audits)
        if promise.kept == (corpus in self._broken):
            self._broken ^= {corpus}
            figures = {name: figure._asdict() for name, figure in promise.figures.items()}
            extra = {"tenant": audit.tenant, "corpus": audit.corpus, **figures}
            if promise.kept:
                LOG.info("promise_kept", extra=extra)
            else:
                LOG.warning("promise_broken", extra=extra)
        return audit._replace(promise=promise)


def promise_of(audits: Sequence[Audit]) -> Promise:
    """What these audits of one corpus say of the qualities that were asked for, each target judged by itself."""
    judged = defaultdict[str, list[Judged]](list)
    for field, name in (("target", "kl"), ("flips", "flips")):
        groups = defaultdict[float, list[Audit]](list)
        for audit in audits:
            if audit.quality is not None and (target := audit.quality[field]):
                groups[target].append(audit)
        for target, group in groups.items():
            comparison = compare(ComparedAnswer(audit.flipped, audit.kl) for audit in group if audit.kl is not None)
            judged[name].append(comparison.judged(Quality(**{name: target}))[name])
    kept = all(figure.decision != "broken" for figures in judged.values() for figure in figures)
    return Promise({name: max(figures, key=_excess) for name, figures in judged.items()}, kept)


def _excess(figure: Judged) -> tuple[bool, float, float]:
    """How far a figure lies above its target; those with enough audits come first."""
    return figure.answers >= LEAST_SAMPLE, figure.low / figure.target, figure.mean / figure.target

"""Whether a model may be blended, and at what ratio: checks of the model itself, then fidelity at several ratios."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from blend.config import BlendConfig
from blend.eval.dataset import Record, make_needles
from blend.eval.evaluator import FULL, PLAIN_REUSE, Method
from blend.eval.metrics import kl_divergence
from blend.eval.report import MethodSummary, Report, report_document
from blend.intervals import Decision, Interval, decide, enough_for, share_interval
from blend.model.decoder import full_prefill
from blend.model.generate import generate
from blend.prefill.blender import Blend, Blender
from blend.prompt import PromptTemplate
from blend.types import LEAD_SHARE
from blend.verified import keep_decision
from blend.version import __version__

if TYPE_CHECKING:
    from blend.model.decoder import Decoder
    from blend.types import PromptLayout

RATIOS = (0.0, 0.02, 0.05, 0.15, 0.30)
CHUNKS, CHUNK_TOKENS = 8, 192  # of a built-in question
_CHECKED_TOKENS = 16  # of an answer
_SAID_BY_ROUNDING = {torch.float32: 0.01, torch.bfloat16: 0.6, torch.float16: 0.1}  # of logits


class ModelCheck(NamedTuple):
    """Something that must hold for any model that is blended. found: how far it is from exact; bound: how far it may be."""

    name: str
    found: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether it holds; NaN does not."""
        return self.found <= self.bound


def check_model(blender: Blender, layout: PromptLayout) -> list[ModelCheck]:
    """The checks, on one prompt whose chunks are cached. Raises as `Blender.prefill` does."""
    decoder = blender.decoder
    exact = decoder.dtype == torch.float32
    every = blender.prefill(layout, config=BlendConfig(selector="all"))
    full = full_prefill(decoder, layout)
    reuse = blender.prefill(layout, config=PLAIN_REUSE)
    few = blender.prefill(layout, config=BlendConfig(ratio=0.05, correction=False, surrogate=False), room=64)
    return [
        ModelCheck(
            "all rows recomputed: KL of the next token to full prefill",
            float(kl_divergence(full.logits.float(), every.logits.float())[0]),
            1e-4 if exact else 0.02,
        ),
        ModelCheck("moved keys, values and states of layer 0: relative error", _error_of_layer_0(reuse, every), 0.02),
        ModelCheck("rows that are not recomputed: share that changed", _changed(few, reuse), 0.0),
        ModelCheck(
            "greedy decoding: logit that the model itself would have gained",
            _lost_logit(few, layout),
            _SAID_BY_ROUNDING[decoder.dtype],
        ),
    ]


def _error_of_layer_0(reuse: Blend, every: Blend) -> float:
    """Of the KV, or the composed state, that depends on tokens and positions alone. Codecs round KV."""
    errors = []
    mine, true = ((*one.cache.view(0), *_states(one)) for one in (reuse, every))
    for moved, fresh in zip(mine, true, strict=True):
        errors.append(float((moved.float() - fresh.float()).norm() / fresh.float().norm().clamp_min(1e-20)))
    return max(errors)


def _states(blend: Blend) -> tuple[torch.Tensor, ...]:
    """The state of layer 0 behind the prompt, if it is recurrent."""
    return (blend.cache.states(blend.layout.rows) or ((),))[0]


def _changed(few: Blend, reuse: Blend) -> float:
    """The share of rows outside the selection whose KV is not that of plain reuse, bit for bit."""
    kept = torch.ones(few.layout.rows, dtype=torch.bool)
    kept[few.selection.rows.cpu()] = False
    changed = torch.zeros(int(kept.sum()), dtype=torch.bool)
    for layer in range(len(few.cache.layers)):
        for mine, theirs in zip(few.cache.view(layer), reuse.cache.view(layer), strict=True):
            rows = kept.nonzero()[:, 0].to(mine.device)
            changed |= (mine[0, :, rows] != theirs[0, :, rows]).any(0).any(-1).cpu()
    return float(changed.float().mean()) if changed.numel() else 0.0


def _lost_logit(blend: Blend, layout: PromptLayout) -> float:
    """By how much the model's own forward pass, over the same cache, prefers another token to one that was decoded."""
    decoder, clone = blend.decoder, blend.cache.clone(room=_CHECKED_TOKENS + 1)
    start = layout.rows - (0 if decoder.recurrent else 1)  # a state cannot go back a row
    clone.truncate(start)
    said = generate(decoder, blend, layout.token_ids, max_new_tokens=_CHECKED_TOKENS, eos_token_id=None).token_ids
    every = torch.tensor([*layout.token_ids, *said], device=decoder.device)
    positions = torch.arange(start, every.shape[0] - 1, device=decoder.device)[None]
    with torch.inference_mode():
        cache = {decoder.cache_argument: decoder.native_cache(clone)}
        out = decoder.run_whole(input_ids=every[None, start:-1], position_ids=positions, use_cache=True, **cache)
    logits = out.logits[0].float()
    chosen = logits.gather(1, every[start + 1 :, None])[:, 0]
    return float((logits.max(1).values - chosen).max())


def verified_methods(selector: str, *, recurrent: bool = False) -> list[Method]:
    """Full recompute, then blended prefill at each ratio.

    recurrent: the model has recurrent layers, whose chunks' leads are always recomputed; so ratios start there.
    """
    ratios = [ratio for ratio in RATIOS if not recurrent or ratio >= LEAD_SHARE]
    blended = [BlendConfig(selector=selector, ratio=ratio) if ratio else BlendConfig("none") for ratio in ratios]
    return [Method(FULL), *(Method(f"{ratio:.0%}", config) for ratio, config in zip(ratios, blended, strict=True))]


@dataclass(frozen=True)
class Verdict:
    """What `blend verify` found. quality: the limit of the mean KL, nats a token."""

    checks: tuple[ModelCheck, ...]
    report: Report
    quality: float

    @property
    def ratios(self) -> list[float]:
        """Those that were measured, ascending."""
        measured = {summary.method for summary in self.report.methods}
        return [ratio for ratio in RATIOS if f"{ratio:.0%}" in measured]

    @property
    def ratio(self) -> float | None:
        """The smallest ratio whose mean KL is surely within the limit; None if none is."""
        return next((ratio for ratio in self.ratios if self._decided(ratio) == "kept"), None)

    @property
    def decision(self) -> Decision:
        """Whether all checks hold and a ratio keeps the limit; "undecided" if more questions might tell."""
        if not all(check.passed for check in self.checks):
            return "broken"
        if self.ratio is not None:
            return "kept"
        return "undecided" if any(self._decided(ratio) == "undecided" for ratio in self.ratios) else "broken"

    @property
    def passed(self) -> bool:
        """Whether the model may be blended."""
        return self.decision == "kept"

    def _decided(self, ratio: float) -> Decision:
        return decide(self._kl(ratio), self.questions, self.quality)

    @property
    def questions(self) -> int:
        """How many were measured."""
        return len({row.record_id for row in self.report.measurements})

    def summary(self, ratio: float) -> MethodSummary:
        """Of blended prefill at this ratio."""
        return self.report.method(f"{ratio:.0%}")

    def _kl(self, ratio: float) -> Interval:
        found = self.summary(ratio).quality["kl"]
        assert found is not None
        return found

    def flips(self, ratio: float) -> Interval:
        """The share of answers that differ from full recompute's."""
        answers = {(row.method, row.record_id): row.answer for row in self.report.measurements}
        name = f"{ratio:.0%}"
        records = [record for method, record in answers if method == name]
        return share_interval(sum(answers[name, one] != answers[FULL, one] for one in records), len(records))

    @property
    def lines(self) -> list[str]:
        """What was found, for people; the last line is the verdict."""
        found = [
            f"{'ok    ' if check.passed else 'FAILED'}  {check.name}: {check.found:.2g} (at most {check.bound:g})"
            for check in self.checks
        ]
        for ratio in self.ratios:
            kl, flips, one = self._kl(ratio), self.flips(ratio), self.summary(ratio)
            found.append(
                f"{ratio:4.0%}  KL {kl.mean:.3f} [{kl.low:.3f}, {kl.high:.3f}], {flips.mean:.0%} other answers "
                f"[{flips.low:.0%}, {flips.high:.0%}], TTFT {one.speedup:.1f} times lower"
            )
        return [*found, self._conclusion]

    @property
    def _conclusion(self) -> str:
        if not all(check.passed for check in self.checks):
            return "failed: this model must not be blended; please report it with these lines"
        if self.decision == "undecided":
            best = self._kl(self.ratios[-1])
            asked = f"{self.questions} question{'' if self.questions == 1 else 's'}"
            enough = enough_for(best, self.questions, self.quality)
            return f"undecided: {asked} cannot show whether the mean KL stays within {self.quality:g}; take --limit {enough}"
        if self.ratio is None:
            return f"failed: no ratio up to {RATIOS[-1]:.0%} keeps the mean KL within {self.quality:g}"
        flips, speedup = self.flips(self.ratio), self.summary(self.ratio).speedup
        return (
            f"PASSED: --ratio {self.ratio:g} keeps the mean KL within {self.quality:g}, TTFT {speedup:.1f} times lower; "
            f"{flips.mean:.0%} [{flips.low:.0%}, {flips.high:.0%}] of the answers differ from full recompute's"
        )

    @property
    def document(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "passed": self.passed,
            "quality": self.quality,
            "ratio": self.ratio,
            "decision": self.decision,
            "checks": [{**check._asdict(), "passed": check.passed} for check in self.checks],
            "flips": {f"{ratio:.0%}": asdict(self.flips(ratio)) for ratio in self.ratios},
            "report": report_document(self.report),
        }


def builtin_records(template: PromptTemplate, limit: int) -> list[Record]:
    """Questions about invented facts in Python's own documentation."""
    from blend_retrieval import chunk_documents, load_documents, write_stdlib_corpus

    with tempfile.TemporaryDirectory() as folder:
        documents = load_documents(write_stdlib_corpus(folder)).documents
    chunks = chunk_documents(documents, template.encode, CHUNK_TOKENS, lambda title, text: f"{title}\n{text}")
    filler = list(dict.fromkeys(chunk.text.strip() for chunk in chunks if chunk.tokens >= CHUNK_TOKENS // 2))
    return make_needles(filler, per_kind=limit // 4 + 1, chunks=CHUNKS, seed=0)[:limit]


def remember(decoder: Decoder, verdict: Verdict) -> None:
    """Note the verdict for this model, dtype and version in kvblend's cache folder."""
    keep_decision(
        decoder,
        {
            "decision": verdict.decision,
            "ratio": verdict.ratio,
            "quality": verdict.quality,
            "version": __version__,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )

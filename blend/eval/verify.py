"""Whether a model may be blended, and at what ratio: checks of the model itself, then fidelity at several ratios."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from blend.compare import kl_divergence
from blend.config import BlendConfig, StateMode
from blend.eval.dataset import Record
from blend.eval.evaluator import PLAIN_REUSE, Method
from blend.eval.needles import make_needles
from blend.eval.report import Report, report_document
from blend.intervals import Decision, Judged
from blend.layout import LEAD_SHARE
from blend.model.decoder import full_prefill
from blend.model.generate import generate
from blend.prefill.blender import Blend, Blender
from blend.prompt_template import PromptTemplate
from blend.quality import Quality
from blend.text import counted
from blend.verified import keep_result
from blend.version import __version__

if TYPE_CHECKING:
    from blend.layout import PromptLayout
    from blend.model.decoder import Decoder

RATIOS = (0.0, 0.02, 0.05, 0.15, 0.30)
CHUNKS = 8  # of a built-in question
CHUNK_TOKENS = 192
_CHECKED_TOKENS = 16  # of an answer
_LOGIT_ROUNDING = {torch.float32: 0.01, torch.bfloat16: 0.6, torch.float16: 0.1}


class ModelCheck(NamedTuple):
    """Something that must hold for any model that is blended. error: how far it is from exact; bound: how far it may be."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether it holds; NaN does not."""
        return self.error <= self.bound


def check_model(blender: Blender, layout: PromptLayout) -> list[ModelCheck]:
    """The checks, on one prompt whose chunks are cached. Raises as `Blender.prefill` does."""
    decoder = blender.decoder
    exact = decoder.dtype == torch.float32
    full_logits = full_prefill(decoder, layout).logits  # at most two prompts are in memory at a time
    recomputed = blender.prefill(layout, config=BlendConfig(selector="all"))
    kl = kl_divergence(full_logits.float(), recomputed.logits.float())
    as_stored = replace(PLAIN_REUSE, states="composed")
    reuse = blender.prefill(layout, config=as_stored)
    moved_error = _error_of_layer_0(reuse, recomputed)
    del recomputed
    few_rows = replace(as_stored, selector=BlendConfig.selector, ratio=0.05)
    blend = blender.prefill(layout, config=few_rows, room=64)
    changed = _changed_share(blend, reuse)
    del reuse
    lost_logit = _lost_logit(blend, layout)
    return [
        ModelCheck("all rows recomputed: KL of the next token to full prefill", float(kl[0]), 1e-4 if exact else 0.02),
        ModelCheck("moved keys, values and states of layer 0: relative error", moved_error, 0.02),
        ModelCheck("rows that are not recomputed: share that changed", changed, 0.0),
        ModelCheck(
            "greedy decoding: logit that the model itself would have gained", lost_logit, _LOGIT_ROUNDING[decoder.dtype]
        ),
    ]


def _error_of_layer_0(reuse: Blend, recomputed: Blend) -> float:
    """The largest error of the KV, or composed state, that depends on tokens and positions alone. Codecs round KV."""
    errors = []
    for moved, fresh in zip(_layer_0(reuse), _layer_0(recomputed), strict=True):
        distance = (moved.float() - fresh.float()).norm()
        norm = fresh.float().norm().clamp_min(1e-20)
        errors.append(float(distance / norm))
    return max(errors)


def _layer_0(blend: Blend) -> tuple[torch.Tensor, ...]:
    """Keys and values of layer 0, and its state behind the prompt if it is recurrent."""
    states = blend.cache.states(blend.layout.rows) or ((),)
    return (*blend.cache.view(0), *states[0])


def _changed_share(blend: Blend, reuse: Blend) -> float:
    """The share of rows outside the selection whose KV is not that of plain reuse, bit for bit."""
    changed = torch.zeros(blend.layout.rows, dtype=torch.bool)
    for layer in range(len(blend.cache.layers)):
        for tensor, expected in zip(blend.cache.view(layer), reuse.cache.view(layer), strict=True):
            changed |= (tensor != expected)[0].any(0).any(-1).cpu()
    reused = torch.ones_like(changed)
    reused[blend.selection.rows.cpu()] = False
    return float(changed[reused].float().mean())


def _lost_logit(blend: Blend, layout: PromptLayout) -> float:
    """By how much the model's own forward pass, over the same cache, prefers another token to one that was decoded."""
    decoder = blend.decoder
    clone = blend.cache.clone(room=_CHECKED_TOKENS + 1)
    start = layout.rows - (0 if decoder.recurrent else 1)  # a state cannot go back a row
    clone.truncate(start)
    answer = generate(decoder, blend, layout.token_ids, max_new_tokens=_CHECKED_TOKENS, eos_token_id=None)
    ids = torch.tensor([*layout.token_ids, *answer.token_ids], device=decoder.device)
    positions = torch.arange(start, ids.shape[0] - 1, device=decoder.device)[None]
    cache = {decoder.cache_argument: decoder.native_cache(clone)}
    with torch.inference_mode():
        out = decoder.run_whole(input_ids=ids[None, start:-1], position_ids=positions, use_cache=True, **cache)
    logits = out.logits[0].float()
    chosen = logits.gather(1, ids[start + 1 :, None])[:, 0]
    return float((logits.max(1).values - chosen).max())


class Way(NamedTuple):
    """A way to blend: a ratio, and what recurrent layers carry over stored chunks."""

    ratio: float
    states: StateMode = "composed"

    @property
    def name(self) -> str:
        """Its name in the report, such as "15%" or "15% last-chunk"."""
        return f"{self.ratio:.0%}" + ("" if self.states == "composed" else f" {self.states}")

    def method(self, selector: str) -> Method:
        """Blended prefill this way."""
        config = BlendConfig(selector if self.ratio else "none", self.ratio, states=self.states)
        return Method(self.name, config)


WAYS = tuple(Way(ratio) for ratio in RATIOS)
# The leads of chunks are always recomputed, so ratios start there.
RECURRENT_WAYS = tuple(
    Way(ratio, states) for ratio in RATIOS if ratio >= LEAD_SHARE for states in ("composed", "last-chunk")
)


@dataclass(frozen=True)
class Verdict:
    """The result of `blend verify`. quality: the limit of the mean KL, nats a token."""

    checks: tuple[ModelCheck, ...]
    report: Report
    quality: float

    @property
    def _kl(self) -> dict[Way, Judged]:
        """The mean KL of the ways that were measured, by ratio."""
        target = Quality(kl=self.quality)
        ways = {way.name: way for way in (*WAYS, *RECURRENT_WAYS)}
        return {
            ways[summary.method]: summary.comparison.judged(target)["kl"]
            for summary in self.report.methods
            if summary.method in ways
        }

    @property
    def best(self) -> Way | None:
        """The way with the smallest ratio whose mean KL is surely within the limit, then the lowest; None if none is."""
        keeping = {way: kl.mean for way, kl in self._kl.items() if kl.decision == "kept"}
        return min(keeping, key=lambda way: (way.ratio, keeping[way]), default=None)

    @property
    def decision(self) -> Decision:
        """Whether all checks hold and a way keeps the limit; "undecided" if more questions might tell."""
        if not all(check.passed for check in self.checks):
            return "broken"
        if self.best is not None:
            return "kept"
        return "undecided" if "undecided" in [kl.decision for kl in self._kl.values()] else "broken"

    @property
    def lines(self) -> list[str]:
        """The result for people; the last line is the verdict."""
        checks = [
            f"{'ok    ' if check.passed else 'FAILED'}  {check.name}: {check.error:.2g} (at most {check.bound:g})"
            for check in self.checks
        ]
        ways = [
            f"{way.name:>4}  KL {kl.mean:.3f} [{kl.low:.3f}, {kl.high:.3f}], {self._cost(way)}"
            for way, kl in self._kl.items()
        ]
        return [*checks, *ways, self._conclusion]

    def _cost(self, way: Way) -> str:
        summary = self.report.method(way.name)
        return f"TTFT {summary.speedup.mean:.1f} times lower, {summary.changes}"

    @property
    def _conclusion(self) -> str:
        if not all(check.passed for check in self.checks):
            return "failed: this model must not be blended; please report it with these lines"
        if self.decision == "undecided":
            closest = min(self._kl.values(), key=lambda kl: kl.mean)
            questions = counted(closest.answers, "question")
            return (
                f"undecided: {questions} cannot show whether the mean KL stays within {self.quality:g}; take --limit "
                f"{closest.enough}"
            )
        limit = f"the mean KL within {self.quality:g}"
        if self.best is None:
            return f"failed: no ratio up to {RATIOS[-1]:.0%} keeps {limit}"
        states = "" if self.best.states == "composed" else ", states from the last chunk alone"
        return f"PASSED: --ratio {self.best.ratio:g}{states} keeps {limit}, {self._cost(self.best)}"

    @property
    def result(self) -> dict[str, Any]:
        """What is remembered of it."""
        return {
            "decision": self.decision,
            "ratio": self.best and self.best.ratio,
            "states": self.best.states if self.best else "composed",
            "quality": self.quality,
        }

    @property
    def document(self) -> dict[str, Any]:
        """The verdict as JSON values."""
        checks = [
            {"name": check.name, "found": check.error, "bound": check.bound, "passed": check.passed}
            for check in self.checks
        ]
        report = report_document(self.report)
        return {"passed": self.decision == "kept", **self.result, "checks": checks, "report": report}


def builtin_records(template: PromptTemplate, limit: int) -> list[Record]:
    """Questions about invented facts in Python's own documentation."""
    from blend_retrieval import chunk_documents, load_documents, write_stdlib_corpus

    with tempfile.TemporaryDirectory() as folder:
        documents = load_documents(write_stdlib_corpus(folder)).documents
    chunks = chunk_documents(documents, template.encode, CHUNK_TOKENS, lambda title, text: f"{title}\n{text}")
    texts = [chunk.text.strip() for chunk in chunks if chunk.tokens >= CHUNK_TOKENS // 2]
    return make_needles(list(dict.fromkeys(texts)), limit, CHUNKS)


def remember(decoder: Decoder, verdict: Verdict) -> None:
    """Note the verdict for this model, dtype and version in kvblend's cache folder."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    keep_result(decoder, {**verdict.result, "version": __version__, "at": at})

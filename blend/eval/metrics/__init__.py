"""How good an answer is (`words`) and how close a method stays to full recompute (`fidelity`)."""

from blend.eval.metrics.fidelity import kl_divergence, top1_agreement
from blend.eval.metrics.words import exact_match, normalise_answer, rouge_l, value_recall, word_f1

__all__ = [
    "exact_match",
    "kl_divergence",
    "normalise_answer",
    "rouge_l",
    "top1_agreement",
    "value_recall",
    "word_f1",
]

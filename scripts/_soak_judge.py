"""Whether an answer is right: the same as that of its question asked alone, or a clear error."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from blend.serve.types import IN_MEMORY

TIE = 1e-3  # nats between the two likeliest tokens; below it rounding decides
LEAST_BLENDED = 0.5  # of all answers; with fewer a soak is one of something else


How = Literal["blended", "computed", "remembered"]
HOWS: tuple[How, ...] = get_args(How)


class Answer(NamedTuple):
    """What came back. made: what decides about it, by its figures. how: its prompt got its KV."""

    text: str
    made: tuple[Any, ...]
    how: How = "blended"

    @classmethod
    def of(cls, text: str, extension: Mapping[str, Any]) -> Answer:
        """With what the reply tells beside it."""
        return cls(text, made_of(extension), how_made(extension.get("figures", {})))


class Reference(NamedTuple):
    """A question's answer asked alone. tokens: the text of each, with the distance in nats to the next likeliest."""

    answer: Answer
    tokens: tuple[tuple[str, float], ...]


def how_made(figures: Mapping[str, Any]) -> How:
    """Blended, computed in full, or remembered: an earlier prompt left full prefill of all that could be blended."""
    if figures.get("reason") == IN_MEMORY or 0 < figures.get("rows", 0) <= figures.get("rows_reused", 0) + 1:
        return "remembered"
    return "computed" if figures.get("method") == "full" else "blended"


def made_of(extension: Mapping[str, Any]) -> tuple[Any, ...]:
    """What decides about an answer beside its question.

    Full prefill, computed now or remembered; or else the hits, source by source, how many of the better caches were missing,
    and how many of the first rows are remembered.
    """
    figures = extension.get("figures", {})
    if how_made(figures) != "blended":
        return ("full",)
    hits = tuple(bool(source.get("hit")) for source in extension.get("sources", ()))
    return (figures.get("method"), hits, figures.get("missing"), figures.get("rows_reused", 0))


def reference(document: Mapping[str, Any]) -> Reference:
    """Out of a whole answer with log-probabilities of two tokens."""
    choice = document["choices"][0]
    tokens = []
    for one in choice["logprobs"]["content"]:
        best = sorted((other["logprob"] for other in one["top_logprobs"]), reverse=True)
        tokens.append((one["token"], best[0] - best[1] if len(best) > 1 else float("inf")))
    answer = Answer.of(choice["message"]["content"], document.get("kvblend", {}))
    return Reference(answer, tuple(tokens))


def is_tie(held: Reference, text: str) -> bool:
    """Whether an answer first differs where the two likeliest tokens are as likely as rounding can tell."""
    same = next((i for i, (a, b) in enumerate(zip(held.answer.text, text, strict=False)) if a != b), None)
    same = min(len(held.answer.text), len(text)) if same is None else same
    end = 0
    for token, distance in held.tokens:
        end += len(token)
        if end > same:
            return distance < TIE
    return False


def is_clear_error(content: bytes) -> bool:
    """Whether a body is an error in OpenAI's shape with something to read in it."""
    try:
        error = json.loads(content)["error"]
        return all(isinstance(error[name], str) and error[name] for name in ("message", "type"))
    except (ValueError, KeyError, TypeError):
        return False


@dataclass
class Ledger:
    """What was seen. off: one line for each thing that must not be, the first twenty."""

    counts: Counter[str] = field(default_factory=Counter)
    off: list[str] = field(default_factory=list)

    def count(self, kind: str) -> None:
        """One more of this kind."""
        self.counts[kind] += 1

    def wrong(self, line: str) -> None:
        """Something that must not be."""
        self.counts["OFF"] += 1
        print(f"OFF {line}", flush=True)  # at once: hours may follow
        if len(self.off) < 20:
            self.off.append(line)

    def judge(self, name: str, answer: Answer, references: Sequence[Reference]) -> None:
        """Hold a greedy answer against that of the same question made in the same way, where there is one."""
        self.count(answer.how)
        held = next((one for one in references if one.answer.made == answer.made), None)
        if held is None:
            self.count("made of other caches")
        elif held.answer.text == answer.text:
            self.count("same answer")
        elif is_tie(held, answer.text):
            self.count("another likeliest token within rounding")
        else:
            self.wrong(f"{name}: {answer.text!r} instead of {held.answer.text!r}, both made of {answer.made}")

    def refused(self, name: str, status: int, content: bytes, *, expected: bool) -> None:
        """An answer with another status than 200."""
        if not is_clear_error(content):
            self.wrong(f"{name}: status {status} without a clear error: {content[:120]!r}")
        elif status >= 500 and not expected:
            self.wrong(f"{name}: status {status} while nothing was broken: {content[:200]!r}")
        else:
            self.count(f"status {status}")

    def too_few_blended(self) -> str:
        """In words, how the answers were made, where fewer than `LEAST_BLENDED` were blended."""
        counts = {how: self.counts[how] for how in HOWS}
        if counts["blended"] and counts["blended"] >= LEAST_BLENDED * sum(counts.values()):
            return ""
        return "too few answers were blended: " + ", ".join(f"{count} {how}" for how, count in counts.items())

    def line(self) -> str:
        """All counts."""
        return ", ".join(f"{kind} {count}" for kind, count in sorted(self.counts.items()))

"""LoCoMo with sessions of long conversations as chunks: `scripts/bench_peers locomo`.

    scripts/bench_peers locomo --data locomo10.json --json l.json
    scripts/bench_peers locomo --data locomo10.json --json l.json --questions 20 --model qwen2.5-coder-1.5b
    scripts/bench_peers locomo --json l.json --show              # measures nothing

A whole conversation has some 20,000 tokens. So BM25 finds the --sessions that fit a question best, and each is a chunk. Every
method answers twice: with the sessions in the order of time, and in the reverse order. Every answer is in --json as soon as it
is given: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from math import isnan, nan
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import numpy as np

from _locomo_data import CATEGORIES, Conversation, Question, asked_text, read_conversations, score, stratified
from _paths import MODEL, command_line
from _results import Results, Row, grouped, markdown, measure_and_show, say
from blend.config import BlendConfig, CorpusConfig, PromptConfig
from blend.errors import ConfigError
from blend.eval.dataset import Record, RecordChunk
from blend.eval.evaluator import PLAIN_REUSE, Evaluator, Method
from blend.eval.report import FULL, Measurement
from blend.intervals import Interval
from blend.select import make_selector
from blend.select.base import scoring_layers

NO_CONTEXT = "no context"
AS_PUBLISHED = BlendConfig(selector="hkvd", ratio=0.15, mask="bottom-right", correction=False, surrogate=False)
METHODS = (
    Method(FULL),
    Method("plain reuse", PLAIN_REUSE),
    Method("published selection, 15 %", AS_PUBLISHED),
    Method("kvblend, 5 %", BlendConfig(ratio=0.05)),
    Method("kvblend, 15 %", BlendConfig(ratio=0.15)),
)
PROMPT = PromptConfig(
    system="You answer questions about a conversation between two people.",
    instruction="These are parts of the conversation, each under its date.\n\n",
    question="{question}",
)
CALIBRATION_SESSIONS = 16  # that no question is asked over
RESAMPLES = 10_000
LEAST_CONVERSATIONS = 5  # below it, resampling says nothing about the spread
FREE = ("json", "show", "data", "questions", "threads", "store", "without_texts")


class Asked(NamedTuple):
    """A question and the sessions that it is asked over, in the order of time. recall: share of its evidence in them."""

    conversation: Conversation
    question: Question
    sessions: tuple[int, ...]

    @property
    def key(self) -> Row:
        """What a row says about the question."""
        return {"conversation": self.conversation.name, "question": self.question.number}

    @property
    def session_names(self) -> set[str]:
        """Names of its sessions."""
        return {session_name(self.conversation, number) for number in self.sessions}

    @property
    def recall(self) -> float | None:
        """Share of the sessions with evidence that are among these. None where the question names none."""
        evidence = self.question.evidence
        return len(evidence & set(self.sessions)) / len(evidence) if evidence else None

    def record(self, sessions: Iterable[int]) -> Record:
        """The question over these sessions in this order."""
        name = f"{self.conversation.name}/{self.question.number}"
        chunks = tuple(self.conversation.sessions[number] for number in sessions)
        return Record(name, asked_text(self.question), (self.question.answer,), chunks)


def session_name(conversation: Conversation, number: int) -> str:
    """A session's name among those of all conversations."""
    return f"{conversation.name}/{number}"


def main(arguments: Sequence[str]) -> int:
    """Measure, then show."""
    parser = command_line(__doc__, rows=True, model=MODEL)
    parser.prog = "bench_peers locomo"
    parser.add_argument("--data", type=Path, help="locomo10.json, or a zip or folder of conversations")
    parser.add_argument(
        "--questions", type=int, default=8, help="of each conversation, over all categories (default 8)"
    )
    parser.add_argument("--sessions", type=int, default=3, help="that a question is asked over (default 3)")
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float32", help="of the model (default float32)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--store", default="memory:", help="keep the sessions' caches there, for this run alone; by default in memory"
    )
    parser.add_argument("--without-texts", type=Path, metavar="FILE", help="write the rows there, to publish them")
    options = parser.parse_args(arguments)
    ended = measure_and_show(options, measure, table)
    if options.without_texts is not None:
        publish(Results(options.json), options.without_texts)
    return ended


def measure(options: argparse.Namespace, results: Results) -> None:
    """Ask every question that --json lacks, in turns over the conversations."""
    if options.data is None:
        raise ConfigError("name LoCoMo's conversations: --data locomo10.json, from github.com/snap-research/locomo")
    conversations = read_conversations(options.data)
    digest = hashlib.sha256(repr(conversations).encode()).hexdigest()
    results.begin(argparse.Namespace(**vars(options), digest=digest), FREE)
    asked = list(questions_in_turns(conversations, options))
    missing = [each for each in asked if results.find("rows", {**each.key, "method": METHODS[-1].name}) is None]
    if not missing:
        return
    spare = calibration_sessions(conversations, asked)
    check_store(options.store, spare, asked, results)
    evaluator = calibrated(options, spare)
    for each in missing:
        answer(each, evaluator, results)


def publish(results: Results, file: Path) -> None:
    """Write the rows with digests in place of the texts. They give the same tables; LoCoMo's text is not ours to pass on."""
    shown = Results(None)
    shown.content = {name: value for name, value in results.content.items() if name not in ("command", "calibration")}
    rows = []
    for row in results.rows("rows"):
        texts = {name: value for name, value in row.items() if name in ("answer", "reverse_answer")}
        digests = {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in texts.items()}
        rows.append({name: value for name, value in row.items() if name != "gold"} | digests)
    shown.content["rows"] = rows
    shown.file = file
    shown.save()


def questions_in_turns(conversations: Sequence[Conversation], options: argparse.Namespace) -> Iterator[Asked]:
    """Each conversation's questions, one of each conversation after the other."""
    chosen = []
    for place, conversation in enumerate(conversations):
        questions = stratified(conversation, options.questions, place)
        chosen.append([retrieved(conversation, question, options.sessions) for question in questions])
    for turn in zip_longest(*chosen):
        yield from filter(None, turn)


def retrieved(conversation: Conversation, question: Question, count: int) -> Asked:
    """The question with the sessions that fit it best by its words."""
    from blend_retrieval.lexical import LexicalIndex

    numbers = list(conversation.sessions)
    texts = [f"{chunk.title}\n{chunk.text}" for chunk in conversation.sessions.values()]
    coverage = LexicalIndex(texts).coverage(question.text)
    best = np.argsort(-coverage, kind="stable")[:count]
    return Asked(conversation, question, tuple(sorted(numbers[place] for place in best)))


def calibration_sessions(conversations: Sequence[Conversation], asked: Sequence[Asked]) -> dict[str, RecordChunk]:
    """Sessions that no question is asked over, by names. Raises `ConfigError` if there are none."""
    used = {name for each in asked for name in each.session_names}
    spare = [
        (session_name(conversation, number), chunk)
        for conversation in conversations
        for number, chunk in conversation.sessions.items()
        if session_name(conversation, number) not in used
    ]
    if not spare:
        raise ConfigError(
            "every session is asked about, none is left to calibrate on: ask fewer --questions or --sessions"
        )
    random.Random("locomo calibration").shuffle(spare)
    return dict(spare[:CALIBRATION_SESSIONS])


def check_store(store: str, spare: Iterable[str], asked: Sequence[Asked], results: Results) -> None:
    """Note which sessions a lasting store is calibrated on. It keeps that when later commands ask more questions.

    Raises `ConfigError` if a question is asked over one of them.
    """
    stores = results.content.setdefault("calibration", {})
    if store == "memory:":
        return
    calibrated_on = set(stores.setdefault(store, list(spare)))
    for each in asked:
        both = calibrated_on.intersection(each.session_names)
        if both:
            raise ConfigError(f"{store} was calibrated on session {min(both)}, now asked about: name another --store")
    results.save()


def calibrated(options: argparse.Namespace, spare: Mapping[str, RecordChunk]) -> Evaluator:
    """The evaluator, with a surrogate context and KV corrections of these sessions, or of its store."""
    import torch

    from blend.model.decoder import Decoder
    from blend.prefill.blender import Blender
    from blend.prompt_template import PromptTemplate
    from blend.store import open_store
    from blend.weights import resolve_model

    torch.set_num_threads(options.threads)
    decoder = Decoder.load(str(resolve_model(options.model)), name=options.model, dtype=options.dtype)
    blender = Blender(decoder, open_store(options.store))
    evaluator = Evaluator(blender, PromptTemplate(decoder.tokenizer, PROMPT), max_new_tokens=options.answer_tokens)
    say(f"calibrating on {len(spare)} sessions that no question is asked over, unless the store is calibrated")
    apart = Record("apart", "apart", (), tuple(spare.values()))
    evaluator.calibrate([apart], CorpusConfig.surrogate_tokens)
    return evaluator


def answer(asked: Asked, evaluator: Evaluator, results: Results) -> None:
    """Rows of all methods on a question, in both orders."""
    in_time = evaluator.measure(asked.record(asked.sessions), METHODS)
    reverse = evaluator.measure(asked.record(reversed(asked.sessions)), METHODS)
    [alone] = evaluator.measure(asked.record(()), METHODS[:1])
    shared = {"category": asked.question.category, "recall": asked.recall, "gold": asked.question.answer}
    results.put("rows", {**asked.key, "method": NO_CONTEXT}, {**shared, **row_of(asked.question, alone, alone)})
    for method, measured, other in zip(METHODS, in_time, reverse, strict=True):
        charged = charged_share(evaluator, method, asked, measured)
        row = {**shared, **row_of(asked.question, measured, in_time[0]), "charged": charged}
        row |= {
            "reverse_answer": other.answer,
            "reverse_score": score(asked.question, other.answer),
            "reverse_kl": other.kl,
        }
        results.put("rows", {**asked.key, "method": method.name}, row)
    say(f"{asked.conversation.name}, question {asked.question.number}: {in_time[0].rows_total} rows")


def row_of(question: Question, measured: Measurement, full: Measurement) -> Row:
    """A method's answer and what it took."""
    return {
        "answer": measured.answer,
        "score": score(question, measured.answer),
        "kl": measured.kl,
        "ttft_s": measured.ttft_s,
        "full_ttft_s": full.ttft_s,
        "rows": measured.rows_total,
        "share": measured.rows_computed / measured.rows_total,
    }


def charged_share(evaluator: Evaluator, method: Method, asked: Asked, measured: Measurement) -> float:
    """Rows computed as a share of full prefill's, with those that only the selection computes.

    The layers below a check layer run on all rows, and are among the rows computed. The question's pass over the stored caches
    is not, so it is added.
    """
    share = measured.rows_computed / measured.rows_total
    if method.config is None:
        return share
    decoder = evaluator.decoder
    score_of = make_selector(method.config.selector).needs(len(decoder.layers)).query
    if score_of is None:
        return share
    record = asked.record(asked.sessions)
    question_rows = len(evaluator.template.layout(record.question, record.chunks).suffix)
    passed = scoring_layers(score_of.layers, decoder.attending)[-1] + 1
    return share + question_rows * passed / (len(decoder.layers) * measured.rows_total)


def table(results: Results) -> Iterator[str]:
    """Scores by category with intervals over conversations, and what each method takes, in Markdown."""
    by_method = {name: rows for (name,), rows in grouped(results.rows("rows"), "method").items()}
    if not by_method:
        raise ConfigError("no answers yet: run it without --show")
    full = by_method[FULL]
    asked = grouped(full, "category")
    named = {number: f"{name} ({len(asked[number,])})" for number, name in CATEGORIES.items() if (number,) in asked}
    lines = []
    for name, rows in by_method.items():
        by_category = grouped(rows, "category")
        cells = [cell(clustered(by_category[number,], "score")) for number in named]
        lines.append([name, *cells, cell(clustered(rows, "score"))])
    yield from markdown(f"score | {' | '.join(named.values())} | all ({len(full)})", lines)
    yield from markdown(
        "method | score less full's | same with another order | same as full's | KL | rows | with selection | sooner",
        ([name, *measures(rows, full)] for name, rows in by_method.items()),
    )
    recall = mean(row["recall"] for row in full if row["recall"] is not None)
    places = {row["conversation"] for row in full}
    prompt = median(row["rows"] for row in full)
    counts = f"{len(places)} conversations, {len(full)} questions, prompts of {prompt:,.0f} rows (median)"
    yield f"\n{counts}; {recall:.0%} of the sessions with evidence were retrieved"


def measures(rows: Sequence[Row], full: Sequence[Row]) -> list[str | None]:
    """What a method takes, and how its answers compare with full recompute's and with those to another order."""
    pairs = paired(rows, full)
    less = [{**row, "less": row["score"] - of_full["score"]} for row, of_full in pairs]
    as_full = [{**row, "as_full": float(row["answer"] == of_full["answer"])} for row, of_full in pairs]
    turned = [{**row, "same": float(row["answer"] == row["reverse_answer"])} for row in rows if "reverse_answer" in row]
    kl = [row["kl"] for row in rows if row["kl"] is not None]
    charged = [row["charged"] for row in rows if "charged" in row]
    sooner = median(row["full_ttft_s"] / row["ttft_s"] for row in rows)
    if not charged:
        return [signed(clustered(less, "less")), *[None] * 6]
    return [
        signed(clustered(less, "less")),
        cell(clustered(turned, "same")),
        cell(clustered(as_full, "as_full")),
        f"{mean(kl):.3f}" if kl else None,
        f"{mean(row['share'] for row in rows):.0%}",
        f"{mean(charged):.0%}",
        f"{sooner:.1f}x",
    ]


def paired(rows: Sequence[Row], full: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Rows with full recompute's on the same question."""
    of_question = {(row["conversation"], row["question"]): row for row in full}
    return [(row, of_question[row["conversation"], row["question"]]) for row in rows]


def clustered(rows: Sequence[Row], name: str) -> Interval:
    """The mean over questions, with its 95 % interval over resampled conversations; of a few conversations without."""
    samples = [np.array([row[name] for row in same], dtype=float) for same in grouped(rows, "conversation").values()]
    sums = np.array([sample.sum() for sample in samples])
    counts = np.array([len(sample) for sample in samples])
    mean_score = float(sums.sum() / counts.sum())
    if len(samples) < LEAST_CONVERSATIONS:
        return Interval(mean_score, nan, nan)
    draws = np.random.default_rng(0).integers(0, len(samples), (RESAMPLES, len(samples)))
    means = sums[draws].sum(1) / counts[draws].sum(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(mean_score, float(low), float(high))


def cell(interval: Interval) -> str:
    """A mean with its interval, if it has one."""
    if isnan(interval.low):
        return f"{interval.mean:.2f}"
    return f"{interval.mean:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def signed(interval: Interval) -> str:
    """A difference with its interval, if it has one."""
    if isnan(interval.low):
        return f"{interval.mean:+.2f}"
    return f"{interval.mean:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}]"

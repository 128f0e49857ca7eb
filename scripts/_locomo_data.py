"""LoCoMo's conversations and questions, and its scores of answers (Maharana et al., arXiv 2402.17753)."""

from __future__ import annotations

import json
import random
import re
import string
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from blend.errors import DatasetError
from blend.eval.dataset import RecordChunk

CATEGORIES = {1: "several sessions", 2: "time", 3: "inference", 4: "one session", 5: "adversarial"}
MULTI_HOP, TEMPORAL, OPEN_DOMAIN, SINGLE_HOP, ADVERSARIAL = CATEGORIES
TURNS = (SINGLE_HOP, MULTI_HOP, TEMPORAL, ADVERSARIAL, OPEN_DOMAIN)  # in which categories give a question each
NOT_MENTIONED = "Not mentioned in the conversation"
NO_INFORMATION = ("no information available", "not mentioned")
SOURCE = "name locomo10.json, or a zip or folder of its conversations, from github.com/snap-research/locomo"
SHORT = (
    "Based on the conversation above, write a short phrase that answers the following question. "
    "Use exact words of the conversation wherever possible."
)
_SESSION = re.compile(r"session_(\d+)")
_EVIDENCE = re.compile(r"D(\d+)(?=:)")
_ARTICLES = re.compile(r"\b(?:a|an|the|and)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Question(NamedTuple):
    """A question about a conversation.

    Attributes:
        number: its place among the conversation's questions.
        category: a key of `CATEGORIES`.
        text: the question.
        answer: the gold answer; of an adversarial question the wrong answer that it suggests.
        evidence: numbers of the sessions that hold the answer.

    """

    number: int
    category: int
    text: str
    answer: str
    evidence: frozenset[int]


class Conversation(NamedTuple):
    """A conversation. sessions: by their numbers, in the order of time."""

    name: str
    sessions: Mapping[int, RecordChunk]
    questions: Sequence[Question]


def read_conversations(path: Path) -> list[Conversation]:
    """The conversations of LoCoMo's file, or of a zip or folder with a file for each. Raises `DatasetError` for others."""
    conversations = [_conversation(name, content) for name, content in _contents(path)]
    if not any(conversation.questions for conversation in conversations):
        raise DatasetError(f"{path}: no LoCoMo conversation with questions; {SOURCE}")
    return sorted(conversations, key=lambda conversation: conversation.name)


def _contents(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names of conversations, and what their files hold."""
    for name, text in _files(path):
        try:
            content = json.loads(text)
        except ValueError:
            raise DatasetError(f"{path}: {name} is not JSON; {SOURCE}") from None
        records = content if isinstance(content, list) else [content]
        for number, record in enumerate(records):
            if isinstance(record, dict):
                label = Path(name).stem if len(records) == 1 else str(number)
                # LoCoMo's list says conv-26 where its older zip says 26: both give the same questions in the same order.
                yield str(record.get("sample_id", label)).removeprefix("conv-"), record


def _files(path: Path) -> Iterator[tuple[str, str]]:
    """Names and texts of the JSON files at a path."""
    if path.is_dir():
        for file in sorted(path.rglob("*.json")):
            yield file.name, file.read_text(encoding="utf-8")
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(".json") and not name.startswith("__MACOSX"):
                    yield name, archive.read(name).decode("utf-8")
    else:
        yield path.name, path.read_text(encoding="utf-8", errors="replace")


def _conversation(name: str, content: Mapping[str, Any]) -> Conversation:
    turns = content.get("conversation", content)
    numbers = [int(match[1]) for match in map(_SESSION.fullmatch, turns) if match]
    sessions = {}
    for number in sorted(numbers):
        if text := _session_text(turns[f"session_{number}"]):
            sessions[number] = RecordChunk(f"DATE: {turns.get(f'session_{number}_date_time', 'unknown')}", text)
    asked = enumerate(content.get("qa", ()))
    return Conversation(name, sessions, [_question(number, qa) for number, qa in asked])


def _session_text(turns: Sequence[Mapping[str, Any]]) -> str:
    """What was said, a line a turn."""
    lines = []
    for turn in turns:
        picture = turn.get("blip_caption")
        shared = f" and shared {picture}." if picture else ""
        lines.append(f'{turn["speaker"]} said, "{turn["text"]}"{shared}')
    return "\n".join(lines)


def _question(number: int, qa: Mapping[str, Any]) -> Question:
    category = int(qa["category"])
    answer = str(qa["adversarial_answer"] if category == ADVERSARIAL else qa["answer"])
    evidence = frozenset(map(int, _EVIDENCE.findall(" ".join(qa.get("evidence", ())))))
    return Question(number, category, str(qa["question"]), answer, evidence)


def stratified(conversation: Conversation, count: int, first: int = 0) -> list[Question]:
    """So many of its questions: categories take turns, and within one the order is shuffled, always in the same way.

    first: place in `TURNS` of the category that begins, so that conversations together ask of all categories at any time.
    """
    shuffled = list(conversation.questions)
    random.Random(f"locomo {conversation.name}").shuffle(shuffled)
    turns = [TURNS[(first + place) % len(TURNS)] for place in range(len(TURNS))]
    waiting = {category: [each for each in shuffled if each.category == category] for category in turns}
    chosen: list[Question] = []
    while len(chosen) < count and any(waiting.values()):
        for category in turns:
            if waiting[category] and len(chosen) < count:
                chosen.append(waiting[category].pop(0))
    return chosen


class Options(NamedTuple):
    """The two answers that an adversarial question offers."""

    a: str
    b: str


def options_of(question: Question) -> Options | None:
    """What the model may choose from. None for questions that it answers in its own words."""
    if question.category != ADVERSARIAL:
        return None
    offered = [question.answer, NOT_MENTIONED]
    random.Random(f"options {question.text}").shuffle(offered)
    return Options(*offered)


def asked_text(question: Question) -> str:
    """The question as the model reads it."""
    options = options_of(question)
    if options is not None:
        return f"{SHORT}\n\nQuestion: {question.text} Select the correct answer: (a) {options.a} (b) {options.b}. Short answer:"
    hint = (
        " Use the DATE of the conversation to answer with an approximate date." if question.category == TEMPORAL else ""
    )
    return f"{SHORT}\n\nQuestion: {question.text}{hint} Short answer:"


def score(question: Question, answer: str) -> float:
    """LoCoMo's score of an answer, from 0 to 1.

    F1 of stemmed words; of several gold answers, separated by commas, the mean over each one's best part. An adversarial
    question wants to hear that the conversation does not say.
    """
    said = answer.strip().split("\n")[0]
    if question.category == ADVERSARIAL:
        chosen = _option_text(question, said).lower()
        return float(any(words in chosen for words in NO_INFORMATION))
    if question.category == MULTI_HOP:
        return several_f1(said, question.answer)
    gold = question.answer.split(";")[0].strip() if question.category == OPEN_DOMAIN else question.answer
    return stemmed_f1(said, gold)


def _option_text(question: Question, said: str) -> str:
    """The option that an answer names by its letter alone, or the answer itself."""
    options = options_of(question)
    letter = re.fullmatch(r"\(?([ab])\)?", said.strip().lower())
    if options is None or letter is None:
        return said
    return options.a if letter[1] == "a" else options.b


def several_f1(answer: str, gold: str) -> float:
    """Mean over gold's parts of the best F1 of any of the answer's parts; commas separate both."""
    parts = [part.strip() for part in answer.split(",")]
    return mean(max(stemmed_f1(part, wanted.strip()) for part in parts) for wanted in gold.split(","))


def stemmed_f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall of stemmed words."""
    said, wanted = _stems(answer), _stems(gold)
    shared = (said & wanted).total()
    return 2 * shared / (said.total() + wanted.total()) if shared else 0.0


def _stems(text: str) -> Counter[str]:
    try:
        from nltk.stem import PorterStemmer
    except ImportError:
        raise DatasetError("LoCoMo's scores need nltk: pip install nltk") from None
    plain = _ARTICLES.sub(" ", text.replace(",", "").lower().translate(_PUNCTUATION))
    return Counter(map(PorterStemmer().stem, plain.split()))

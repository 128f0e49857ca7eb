"""`--reproducible`: the same prompt gives the same answer, whatever was asked before and whatever is asked at the same time."""

import logging
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import passes_of
from rooms import QUESTION, make_rag, serving
from served import CHAT, Served, listening

from blend.serve.failures import LOG
from tests.towns import documents

PROMPTS = 200
AGAIN = 40  # by a second server
PASSAGES = [part for text in documents().values() for part in text.split("\n\n")[1:]]
LETTERS = [
    f"Letter {number}: the ferry to the island leaves at {number + 5} and carries {31 * number} sheep."
    for number in range(12)
]  # of which the corpus knows nothing
MADE = ("method", "reason", "edits", "rows", "rows_computed", "rows_reused", "rows_moved", "hits")


def prompts(count: int) -> list[dict[str, Any]]:
    """Bodies of requests: text of the corpus and new text that recur in other orders, turns that go on, and edited ones."""
    draw = random.Random(1)
    return [body(draw, number) for number in range(count)]


def body(draw: random.Random, number: int) -> dict[str, Any]:
    question = f"How many gates does number {number} have?"
    pasted = "\n\n".join(draw.sample(PASSAGES, 3) + draw.sample(LETTERS, 2))
    clock = {"role": "system", "content": f"It is {number % 24} o'clock. {LETTERS[1]}"}
    said = [{"role": "user", "content": question}]
    fields: dict[str, Any] = {}
    kind = number % 6
    if kind == 0:
        fields["kvblend"] = {"retrieve": {}}
    elif kind == 1:
        said[0]["content"] = f"{pasted}\n\n{question}"
    elif kind == 2:
        fields["documents"] = [{"text": text} for text in draw.sample(LETTERS, 3)]
    elif kind == 3:  # the same conversations, of several lengths
        told = [{"role": "user", "content": f"{LETTERS[0]}\n\n{PASSAGES[number % 3]}\n\n{PASSAGES[7]}"}]
        for turn in range(number // 6 % 4):
            told += [{"role": "assistant", "content": "gates gates"}, {"role": "user", "content": f"And {turn}?"}]
        told[-1]["content"] += f" {question}"
        said = told
    elif kind == 4:  # a clock in front of the same text
        told = [{"role": "user", "content": " ".join(PASSAGES[5:9])}, {"role": "assistant", "content": "Yes."}]
        said = [clock, *told, *said]
    else:  # a clock in front of the same documents, which no corpus has
        said = [clock, {"role": "user", "content": "Wait."}, {"role": "assistant", "content": "I will."}, *said]
        fields["documents"] = [{"text": text} for text in LETTERS[2:8]]
    warm = {"temperature": 1.0} if kind == 1 and number > 9 else {}
    return {"messages": said, "max_tokens": 3, "logprobs": True, "user": "ann", **fields, **warm}


def answers(
    served: Served, bodies: Sequence[dict[str, Any]], order: Sequence[int], together: int = 1
) -> dict[int, tuple[Any, ...]]:
    """The answers to each body, so many asked at a time: tokens, log probabilities to the last bit, and how they were made."""
    by_number = dict[int, tuple[Any, ...]]()
    with httpx.Client(base_url=served.url, timeout=60) as client, ThreadPoolExecutor(together) as pool:
        replies = pool.map(lambda number: client.post(CHAT, json=bodies[number]), order)
        for number, reply in zip(order, replies, strict=True):
            assert reply.status_code == 200, reply.text
            document = reply.json()
            (choice,) = document["choices"]
            tokens = tuple((token["token"], token["logprob"]) for token in choice["logprobs"]["content"])
            figures = document["kvblend"]["figures"]
            by_number[number] = (tokens, *(figures.get(name) for name in MADE))
    return by_number


@contextmanager
def started(filled: tuple[Path, Path], folder: Path, **options: Any) -> Iterator[Served]:
    store = shutil.copytree(filled[0], folder / "store")
    with serving(store, filled[1], **options) as service, listening(service) as served:
        yield served


def shuffled(seed: int, count: int = PROMPTS) -> list[int]:
    """The numbers of so many prompts, in any order."""
    return random.Random(seed).sample(range(PROMPTS), count)


def test_two_hundred_prompts_in_random_orders_alone_and_under_load(
    filled: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = prompts(PROMPTS)
    with started(filled, tmp_path / "first", reproducible=True, least_gain=32) as served:
        passes = passes_of(served.state.service.engine, monkeypatch)
        first = answers(served, bodies, shuffled(seed=1))
        assert served.counts()["prompts_blended_total"] >= PROMPTS / 5
        alone = Counter(rows for (rows,) in passes)
        passes.clear()
        again = answers(served, bodies, shuffled(seed=2), together=8)
        # Passes over other rows may round otherwise, though those of so small a model seldom do.
        assert Counter(rows for (rows,) in passes) == alone
    with started(filled, tmp_path / "second", reproducible=True, least_gain=32, audit=1.0) as served:
        second = answers(served, bodies, shuffled(seed=3, count=AGAIN))
    assert again == first
    assert second == {number: first[number] for number in second}


def test_a_store_that_lacks_caches_is_completed_before_the_first_answer(
    filled: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blend.serve.service.EVERY_S", 0.01)
    store = shutil.copytree(filled[0], tmp_path / "store")
    caches = sorted((store / "kv" / "objects").rglob("*.safetensors"))
    for cache in caches[::2]:
        cache.unlink()
    with caplog.at_level(logging.INFO, logger=LOG.name), serving(store, filled[1], reproducible=True):
        assert sorted((store / "kv" / "objects").rglob("*.safetensors")) == caches
    told = [record for record in caplog.records if record.getMessage() == "completing_corpus"]
    assert told
    assert all(record.computed <= record.of for record in told)  # type: ignore[attr-defined]


def test_a_question_stores_nothing(filled: tuple[Path, Path], tmp_path: Path) -> None:
    store = shutil.copytree(filled[0], tmp_path / "store")
    rag = make_rag(store, filled[1], reproducible=True)
    for cache in list((store / "kv" / "objects").rglob("*.safetensors"))[::2]:
        cache.unlink()
    caches = sorted((store / "kv").rglob("*.safetensors"))
    first = rag.answer(QUESTION, max_new_tokens=4)
    again = rag.answer(QUESTION, max_new_tokens=4)
    assert not all(first.blend.hits)
    assert again.blend.hits == first.blend.hits
    assert again.generation.token_ids == first.generation.token_ids
    assert sorted((store / "kv").rglob("*.safetensors")) == caches

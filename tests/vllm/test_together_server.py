"""Clients that ask vLLM's own server at once and bring the same files: text is computed once, apart for each tenant.

Real weights answer, so that text in a wrong place is seen.
"""

import json
import math
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Any, NamedTuple

import pytest
from machines import Server, serving, until
from places import REPOSITORY

from blend.integrations.vllm.contract import BOOK
from blend.serve.prompts.learned_list import LearnedTexts
from blend.store import open_store
from blend.weights import resolve_model

pytestmark = pytest.mark.inside_vllm
PAGES = ("serving", "selection", "study")
FILES, CHARACTERS = 2, 1200
CLIENTS = 5
ORDERS = list(permutations(range(FILES)))
MOST_KL = 0.05
"""From the first token's probabilities over text that was learned before; from full prefill's they are .06 to .5 apart."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("together")
    model = resolve_model("smollm2-135m")
    with serving(folder / "store", model, folder / "server.log", codec="native", correction=False) as server:
        yield server


class Texts:
    """Files that no prompt had before."""

    def __init__(self) -> None:
        self._text = "\n".join((REPOSITORY / "docs" / f"{page}.md").read_text() for page in PAGES)

    def take(self) -> list[str]:
        starts = range(0, FILES * CHARACTERS, CHARACTERS)
        files = [self._text[start : start + CHARACTERS].rpartition("\n")[0] for start in starts]
        self._text = self._text[FILES * CHARACTERS :]
        return files


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts()


def prompt(number: int, files: Sequence[str]) -> str:
    """What a client says: files in an order of its own, behind a task of its own."""
    order = [files[index] for index in ORDERS[number % len(ORDERS)]]
    return "\n\n".join((f"Task {number}: find what is said about {number}.", *order, f"Now do task {number}."))


class Reply(NamedTuple):
    """first: the log-probabilities of the likeliest first tokens."""

    first: dict[str, float]
    figures: dict[str, Any]

    def kl_from(self, other: "Reply") -> float:
        """Of its first token; what is not among the likeliest there is as likely as the last one of these."""
        least = min(other.first.values())
        return sum(math.exp(log) * (log - other.first.get(token, least)) for token, log in self.first.items())


def asked(server: Server, question: str, **more: Any) -> Reply:
    reply = server.reply(question, logprobs=True, top_logprobs=20, max_tokens=2, **more)
    [first, *_] = reply["choices"][0]["logprobs"]["content"]
    likeliest = {token["token"]: token["logprob"] for token in first["top_logprobs"]}
    return Reply(likeliest, reply["kvblend"]["figures"])


def together(server: Server, questions: Sequence[str], salts: Sequence[str] = ()) -> list[Reply]:
    """The replies to requests that come at once. salts: of their tenants."""
    at_once = threading.Barrier(len(questions))

    def ask(question: str, salt: str) -> Reply:
        at_once.wait(60)
        return asked(server, question, **({"cache_salt": salt} if salt else {}))

    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(ask, questions, salts or [""] * len(questions)))


def check_answers(server: Server, questions: Sequence[str], replies: Sequence[Reply]) -> None:
    """They are those over text that was learned before. vLLM's prefix cache knows nothing of another generation."""
    until(lambda: server.running() == 0)
    open_store(str(server.store / "kv")).advance()
    for question, reply in zip(questions, replies, strict=True):
        learned = asked(server, question)
        assert learned.figures["rows_reused"] == 0
        assert "rows_shared" not in learned.figures
        assert abs(learned.kl_from(reply)) < MOST_KL


def total(replies: Sequence[Reply], *names: str) -> int:
    return sum(reply.figures.get(name, 0) for reply in replies for name in names)


def gained(server: Server, before: dict[str, float], prompts: int) -> dict[str, float]:
    """What kvblend's counters on vLLM's page of metrics have gained, once so many prompts have ended."""
    ends = ("prompts_blended", "fallbacks_cold", "fallbacks_failed")

    def counted() -> dict[str, float]:
        counts = server.counts()
        more = {name: count - before.get(name, 0.0) for name, count in counts.items()}
        return more if sum(more.get(name, 0.0) for name in ends) >= prompts else {}

    return dict(until(counted))


def test_what_clients_share_is_computed_once(server: Server, texts: Texts) -> None:
    files = texts.take()
    questions = [prompt(number, files) for number in range(CLIENTS)]
    before = server.counts()
    apart = together(server, questions, [f"tenant {number}" for number in range(CLIENTS)])
    assert [reply.figures["reason"] for reply in apart] == ["cold"] * CLIENTS, "each tenant computes its own"
    whole = total(apart, "rows")
    assert total(apart, "rows_computed") == whole
    assert gained(server, before, CLIENTS).get("rows_ahead", 0) == 0

    before = server.counts()
    replies = together(server, questions)
    counts = gained(server, before, CLIENTS)
    assert [reply.figures["method"] for reply in replies] == ["rows"] * CLIENTS
    assert all(reply.figures["rows_shared"] > 0.7 * reply.figures["rows"] for reply in replies)
    assert counts["prompts_blended"] == CLIENTS
    for name in ("rows_ahead", "rows_shared"):
        assert counts[name] == total(replies, name)
    assert counts["rows_recomputed"] == total(replies, "rows_computed")
    assert counts["rows_recomputed"] + counts["rows_ahead"] < 0.6 * whole
    check_answers(server, questions, replies)


def test_two_tenants_share_within_each_alone(server: Server, texts: Texts) -> None:
    files = texts.take()
    questions = [prompt(number, files) for number in range(4)]
    replies = together(server, questions, ["mill", "inn", "mill", "inn"])
    for tenant in (replies[::2], replies[1::2]):
        shared = [reply.figures["rows_shared"] for reply in tenant]
        assert max(shared) > 0.7 * tenant[0].figures["rows"]
        assert total(tenant, "rows_ahead") >= max(shared), "what the other one has stored is no hint"
    assert asked(server, prompt(4, files), cache_salt="barn").figures["reason"] == "cold"


class LeavingClient:
    """Sends a request, and goes away without reading the reply."""

    def __init__(self, server: Server, question: str) -> None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": question}], "max_tokens": 8, "stream": True}
        raw = json.dumps(body).encode()
        host, port = server.url.removeprefix("http://").split(":")
        self._connection = socket.create_connection((host, int(port)))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self._connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)

    def leave(self) -> None:
        self._connection.close()


def test_where_one_client_leaves_the_others_are_answered(server: Server, texts: Texts) -> None:
    """It computes for all: they come while vLLM is busy with another prompt, and the shortest one comes first."""
    files = texts.take()
    first, *questions = [prompt(number, files) + " Please." * 4 * number for number in range(4)]
    known = LearnedTexts(server.store / BOOK)
    learned = len(known.index())
    before = server.counts()
    with ThreadPoolExecutor(2) as pool:
        other = "\n\n".join(text for _ in range(3) for text in texts.take())
        busy = pool.submit(asked, server, other, kvblend={"method": "full"})
        until(lambda: server.running() == 1)
        leaving = LeavingClient(server, first)
        replies = pool.submit(together, server, questions)
        until(lambda: len(known.index()) >= learned + FILES)  # it begins with the first file
        leaving.leave()
        answered = replies.result()
        busy.result()
    counts = gained(server, before, len(questions))
    assert counts["prompts_blended"] == len(questions)
    assert all(reply.figures["rows_shared"] > 0.7 * reply.figures["rows"] for reply in answered)
    assert 0 < counts["rows_ahead"] < 1.2 * answered[0].figures["rows"], "the next one goes on"
    check_answers(server, questions, answered)

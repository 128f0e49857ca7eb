"""What clients say about the text that the server keeps: for how long, in which session, and why text was not reused."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from rooms import serving, settled
from served import CHAT, Served, listening

from blend.serve.http.requests import ApiKeys
from blend.store.backend import CACHES
from tests.tiny_model import save_tiny_model
from tests.towns import documents

DAY_S = 86_400
LIMIT = 12  # texts that are tried until the budget is full
WORDS = sorted({word for text in documents().values() for word in text.split() if word.isalpha()})


def text(number: int, sentences: int = 24) -> str:
    """Some 500 tokens, and no 32 of them as in another text."""
    rng = random.Random(number)
    return "".join(f"{' '.join(rng.choices(WORDS, k=12))} {rng.randrange(10**6)}. " for _ in range(sentences))


class Talk:
    """A client with an API key and an end user, of a server that is idle after each answer."""

    def __init__(self, served: Served, key: str = "none", user: str = "") -> None:
        self._served = served
        self._headers = {"authorization": f"Bearer {key}"}
        self._user = {"safety_identifier": user} if user else {}

    def ask(self, words: str, path: str = CHAT, **own: Any) -> dict[str, Any]:
        """The figures of an answer."""
        message = {"role": "user", "content": f"{words}\n\nHow many gates are there?"}
        return self.post({"messages": [message], "max_tokens": 4, "kvblend": own, **self._user}, path)["figures"]  # type: ignore[no-any-return]

    def post(self, body: dict[str, Any], path: str) -> dict[str, Any]:
        response = httpx.post(f"{self._served.url}{path}", json=body, headers=self._headers, timeout=60)
        assert response.status_code == 200, response.text
        settled(self._served.state.service)
        return {**response.json()["kvblend"], "usage": response.json()["usage"]}

    def delete(self, session: str) -> dict[str, Any]:
        url = f"{self._served.url}/v1/sessions/{session}"
        response = httpx.delete(url, params=self._user, headers=self._headers)
        assert response.status_code == 200, response.text
        return dict(response.json())


Start = Callable[..., Served]


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Start]:
    """Starts a server after another over one new store."""
    with ExitStack() as stack:

        def begin(folder: Path = model, keys: ApiKeys | None = None, **options: Any) -> Served:
            stack.close()
            service = stack.enter_context(serving(tmp_path / "own", folder, **options))
            return stack.enter_context(listening(service, keys))

        yield begin


def size_of_text(start: Start) -> int:
    """Bytes of the caches of a text."""
    served = start()
    Talk(served).ask(text(0))
    return int(served.state.service.tenant("").learned.nbytes)


def why(figures: dict[str, Any]) -> dict[str, int]:
    return {part["reason"]: part["tokens"] for part in figures["not_reused"]}


def learned(figures: dict[str, Any]) -> bool:
    """Whether most of the text came from the store."""
    assert figures["method"] == "blend"
    return sum(why(figures).values()) < figures["rows"] / 4


def test_pinned_text_outlives_pressure_that_evicts_other_text(start: Start) -> None:
    size = size_of_text(start)
    talk = Talk(start(prefix_budget=0, learn_budget=4 * size))
    assert talk.ask(text(0), ttl=600)["kept"] is not None
    kept = talk.ask(text(1), session="mill")["kept"]
    assert (kept["tokens"], kept["seconds"]) == (kept["of"], DAY_S)
    talk.ask(text(2))
    for number in range(3, LIMIT):
        talk.ask(text(number))
    assert learned(talk.ask(text(0)))
    figures = talk.ask(text(2))
    assert (learned(figures), figures["not_reused"][0]["reason"]) == (False, "evicted")
    talk = Talk(start(prefix_budget=0, learn_budget=4 * size))  # the next process has the same pins
    for number in range(20, 20 + LIMIT):
        talk.ask(text(number))
    assert learned(talk.ask(text(1)))


def test_pins_take_half_of_the_budget_and_the_answer_says_what_was_kept(start: Start) -> None:
    talk = Talk(start(prefix_budget=0, learn_budget=5 * size_of_text(start)))
    kept = [talk.ask(text(number), ttl=60.5)["kept"] for number in range(5)]
    assert all(reply["tokens"] == reply["of"] and reply["seconds"] == 60.5 for reply in kept[:2])
    assert all(reply["tokens"] < reply["of"] for reply in kept[2:])
    assert kept[4]["tokens"] == 0
    figures = talk.ask(text(4))
    assert (learned(figures), figures["kept"]) == (True, None), "it is ordinary text"
    for number in range(10, 10 + LIMIT):
        talk.ask(text(number))
    assert [learned(talk.ask(text(number))) for number in (0, 1, 3)] == [True, True, False]


def test_deleting_a_session_forgets_what_it_alone_brought(start: Start) -> None:
    keys = ApiKeys([("a", "ann"), ("b", "bob")])
    served = start(keys=keys)
    ann, bob, ada = Talk(served, "a"), Talk(served, "b"), Talk(served, "a", "ada")
    own, shared, public, alone, read_again = map(text, range(5))
    ann.ask(public)
    ann.ask(read_again, session="mill")
    assert ann.ask(read_again)["rows_reused"] > 200, "from memory, and without a session"
    ann.ask(alone, session="mill")
    for talk in (ann, bob, ada):
        talk.ask(own, session="mill")
        talk.ask(shared, session="mill")
    ann.ask(shared, session="quay")
    ann.ask(public, session="mill")
    assert ann.ask(alone, session="mill")["rows_reused"] > 200
    store = served.state.service.tenant("ann").rag().store
    caches = set(store.backend.names(CACHES))
    reply = ann.delete("mill")
    assert (reply["id"], reply["object"], reply["deleted"]) == ("mill", "session", True)
    assert reply["texts"] > 1
    assert min(reply["bytes"], reply["prefix_bytes"]) > 0
    assert ann.delete("mill") == {**reply, "texts": 0, "bytes": 0, "prefix_bytes": 0}
    assert all(learned(ann.ask(words, cold=True)) for words in (shared, public, read_again)), "others use them, too"
    assert learned(bob.ask(own, cold=True))
    assert learned(ada.ask(own, cold=True, session="mill")), "the session of that name is another user's"
    left = set(store.backend.names(CACHES))
    assert left < caches
    ada.delete("mill")
    assert set(store.backend.names(CACHES)) < left, "equal pieces of two users had one cache"
    figures = ann.ask(alone)
    assert (learned(figures), figures["not_reused"][0]["reason"]) == (False, "new")
    assert figures["rows_reused"] < 50, "its rows are gone from the prefix cache"
    response = httpx.delete(f"{served.url}/v1/sessions/Mill", headers={"authorization": "Bearer a"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "session")
    response = httpx.delete(f"{served.url}/v1/sessions/mill", headers={"authorization": "Bearer c"})
    assert response.status_code == 401


def test_reasons_in_a_word(start: Start, tmp_path: Path, model: Path) -> None:
    served = start(prefix_budget=0)
    talk = Talk(served)
    short = talk.ask("The harbour.")
    assert (short["reason"], short["kept"]) == ("too short", None)
    assert next(iter(why(talk.ask(text(0))))) == "new"
    known = text(0)
    half = known.index(". ", len(known) // 2) + 2
    edited = why(talk.ask(f"{known[:half]}The bell of the mill is new. {known[half:]}"))
    assert next(iter(edited)) == "edited"
    assert sum(edited.values()) < 250, "the text around the edit is reused"
    assert served.counts()['not_reused_tokens_total{reason="edited"}'] == edited["edited"]
    another = save_tiny_model(tmp_path / "another", "\n".join(documents().values()), seed=1)
    served = start(another, prefix_budget=0)
    assert next(iter(why(Talk(served).ask(known)))) == "another model"
    assert learned(Talk(served).ask(known)), "both models have their caches now"
    served = start(prefix_budget=0, learn_budget=1000)
    for _ in range(2):
        figures = Talk(served).ask(text(5))
    assert next(iter(why(figures))) == "refused"
    served = start(prefix_budget=0, learn_budget=0)
    assert next(iter(why(Talk(served).ask(text(6))))) == "refused"


def test_why_nothing_was_blended_in_a_word(store: Path, model: Path) -> None:
    with serving(store, model, prefix_budget=0, least_gain=0) as service, listening(service) as served:
        figures = Talk(served).ask(text(1, 100))
        assert (figures["method"], figures["reason"]) == ("full", "new")
        assert f'fallbacks_total{{reason="{figures["reason"]}"}}' in served.counts()


def marked(words: str, ttl: str | None = None) -> dict[str, Any]:
    mark = {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})
    return {"type": "text", "text": words, "cache_control": mark}


def test_marks_of_anthropic_keep_what_stands_before_them(start: Start) -> None:
    served = start(prefix_budget=0)
    talk = Talk(served)
    content = [marked(text(2)), {"type": "text", "text": text(3)}]
    body = {
        "max_tokens": 4,
        "system": [marked(text(1), "1h")],
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Hm."}],
    }
    body["messages"].append({"role": "user", "content": "How many gates are there?"})  # type: ignore[union-attr]
    reply = talk.post(body, "/v1/messages")
    kept, rows = reply["figures"]["kept"], reply["figures"]["rows"]
    assert kept["seconds"] == 300
    assert rows / 2 < kept["tokens"] == kept["of"] < rows * 0.85
    written = reply["usage"]["cache_creation_input_tokens"]
    assert reply["usage"]["cache_creation"] == {"ephemeral_5m_input_tokens": written, "ephemeral_1h_input_tokens": 0}
    whole = {**body, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    reply = talk.post(whole, "/v1/messages")
    assert reply["figures"]["kept"]["tokens"] > rows * 0.9
    assert reply["figures"]["kept"]["seconds"] == 3600
    assert reply["usage"]["cache_creation"]["ephemeral_1h_input_tokens"] > 0


def test_a_stream_says_what_is_kept_with_its_first_chunk(start: Start) -> None:
    served = start()
    body = {"messages": [{"role": "user", "content": text(1)}], "max_tokens": 4, "stream": True}
    body["kvblend"] = {"session": "mill", "ttl": 90}
    lines = httpx.post(f"{served.url}{CHAT}", json=body, timeout=60).text.splitlines()
    first = json.loads(lines[0].removeprefix("data: "))
    kept = first["kvblend"]["figures"]["kept"]
    assert (kept["tokens"], kept["seconds"]) == (kept["of"], 90)


@pytest.mark.parametrize("fields", [{"ttl": 0.5}, {"ttl": 86_401}, {"ttl": "60"}, {"session": "A b"}, {"session": ""}])
def test_wrong_wishes_are_refused(served: Served, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "kvblend": fields}
    response = httpx.post(f"{served.url}{CHAT}", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, f"kvblend.{next(iter(fields))}")

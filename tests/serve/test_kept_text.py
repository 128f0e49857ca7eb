"""What clients say about the text that the server keeps: for how long, in which session, and why text was not reused."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from rooms import serving, settled
from served import CHAT, Served, listening

from blend.serve.http.keys import ApiKeys
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

    def ask(self, words: str, **own: Any) -> Any:
        """The figures of an answer."""
        message = {"role": "user", "content": f"{words}\n\nHow many gates are there?"}
        return self.post({"messages": [message], "max_tokens": 4, "kvblend": own, **self._user})["figures"]

    def post(self, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
        response = httpx.post(f"{self._served.url}{path}", json=body, headers=self._headers, timeout=60)
        assert response.status_code == 200, response.text
        settled(self._served.state.service)
        return {**response.json()["kvblend"], "usage": response.json()["usage"]}

    def delete(self, session: str) -> httpx.Response:
        url = f"{self._served.url}/v1/sessions/{session}"
        return httpx.delete(url, params=self._user, headers=self._headers)


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


def why(figures: dict[str, Any]) -> dict[str, int]:
    return {part["reason"]: part["tokens"] for part in figures["not_reused"]}


def learned(figures: dict[str, Any]) -> bool:
    """Whether most of the text came from the store."""
    assert figures["method"] == "blend"
    return sum(why(figures).values()) < figures["rows"] / 4


def test_pinned_text_outlives_pressure_that_evicts_other_text(start: Start) -> None:
    served = start()
    Talk(served).ask(text(0))
    budget = 4 * served.state.service.tenant("").learned.nbytes
    talk = Talk(start(prefix_budget=0, learn_budget=budget))
    assert talk.ask(text(0), ttl=600.5)["kept"]["seconds"] == 600.5
    kept = talk.ask(text(1), session="mill")["kept"]
    assert (kept["tokens"], kept["seconds"]) == (kept["of"], DAY_S)
    kept = talk.ask(text(2), ttl=60)["kept"]
    assert kept["tokens"] < kept["of"], "half of the budget is pinned"
    for number in range(3, LIMIT):
        assert talk.ask(text(number))["kept"] is None
    assert learned(talk.ask(text(0)))
    figures = talk.ask(text(2))
    assert (learned(figures), figures["not_reused"][0]["reason"]) == (False, "evicted")
    talk = Talk(start(prefix_budget=0, learn_budget=budget))  # the next process has the same pins
    for number in range(20, 20 + LIMIT):
        talk.ask(text(number))
    assert learned(talk.ask(text(1)))


def test_deleting_a_session_forgets_what_it_alone_brought(start: Start) -> None:
    served = start(keys=ApiKeys([("a", "ann"), ("b", "bob")]))
    ann, bob, ada = Talk(served, "a"), Talk(served, "b"), Talk(served, "a", "ada")
    own, alone, read_again = map(text, range(3))
    ann.ask(read_again, session="mill")
    assert ann.ask(read_again)["rows_reused"] > 200, "from memory, and without a session"
    for talk in (ann, bob, ada):
        talk.ask(own, session="mill")
    ann.ask(alone, session="mill")
    assert ann.ask(alone, session="mill")["rows_reused"] > 200
    reply = ann.delete("mill").json()
    assert (reply["id"], reply["object"], reply["deleted"]) == ("mill", "session", True)
    assert min(reply["texts"], reply["bytes"], reply["prefix_bytes"]) > 0
    assert ann.delete("mill").json() == {**reply, "texts": 0, "bytes": 0, "prefix_bytes": 0}
    assert learned(ann.ask(read_again, cold=True))
    assert learned(bob.ask(own, cold=True))
    assert learned(ada.ask(own, cold=True, session="mill")), "the session of that name is another user's"
    figures = ann.ask(alone)
    assert (learned(figures), figures["not_reused"][0]["reason"]) == (False, "new")
    assert figures["rows_reused"] < 50, "its rows are gone from the prefix cache"
    refused = ann.delete("Mill")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "session")
    assert Talk(served, "c").delete("mill").status_code == 401


def test_holders_of_keys_do_not_share_sessions(start: Start) -> None:
    served = start(keys=ApiKeys([("xenia", ""), ("yuri", "")]))
    xenia, yuri = Talk(served, "xenia"), Talk(served, "yuri")
    own = text(31)
    xenia.ask(own, session="mill")
    assert yuri.delete("mill").json()["texts"] == 0
    assert xenia.delete("mill").json()["texts"] > 0


def test_names_that_a_client_invents_take_no_pins_of_another_key(start: Start) -> None:
    served = start()
    Talk(served).ask(text(0))
    budget = 6 * served.state.service.tenant("").learned.nbytes
    served = start(keys=ApiKeys([("xenia", ""), ("yuri", "")]), prefix_budget=0, learn_budget=budget)

    def is_pinned(number: int, key: str, user: str) -> bool:
        kept = Talk(served, key, user).ask(text(number), ttl=600)["kept"]
        return bool(kept["tokens"] == kept["of"])

    assert [is_pinned(number, "xenia", f"user {number}") for number in range(40, 44)] == [True, True, True, False]
    assert is_pinned(50, "yuri", "")


def test_behind_a_proxy_nobody_is_taken_for_another(start: Start) -> None:
    """Without keys and names, all requests of this machine are one end user's, but for those that a proxy passes on."""
    served = start(unnamed="this machine")

    def moved(hour: int, **headers: str) -> int:
        said = [
            ("system", f"It is {hour} o'clock.\n{text(32)}"),
            ("user", "Hello."),
            ("assistant", "Yes?"),
            ("user", "Gates?"),
        ]
        messages = [{"role": role, "content": content} for role, content in said]
        body = {"messages": messages, "max_tokens": 4, "kvblend": {"edits": "fast"}}
        response = httpx.post(f"{served.url}{CHAT}", json=body, headers=headers, timeout=60)
        settled(served.state.service)
        return int(response.json()["kvblend"]["figures"]["rows_moved"])

    assert moved(9) == 0
    assert moved(10) > 200
    assert moved(11, **{"X-Forwarded-For": "10.0.0.7"}) == 0
    assert moved(12) > 200


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
    served = start(prefix_budget=0, least_gain=0)
    figures = Talk(served).ask(text(7, 100))
    assert (figures["method"], figures["reason"]) == ("full", "new")
    assert served.counts()['fallbacks_total{reason="new"}'] == 1


def test_marks_of_anthropic_keep_what_stands_before_them(start: Start) -> None:
    talk, mark = Talk(start(prefix_budget=0)), {"type": "ephemeral"}
    lasting = {**mark, "ttl": "1h"}
    said = [{"type": "text", "text": text(2), "cache_control": mark}, {"type": "text", "text": text(3)}]
    body = {
        "max_tokens": 4,
        "system": [{"type": "text", "text": text(1), "cache_control": lasting}],
        "messages": [
            {"role": "user", "content": said},
            {"role": "assistant", "content": "Hm."},
            {"role": "user", "content": "How many gates are there?"},
        ],
    }
    reply = talk.post(body, "/v1/messages")
    kept, rows = reply["figures"]["kept"], reply["figures"]["rows"]
    assert kept["seconds"] == 300
    assert rows / 2 < kept["tokens"] == kept["of"] < rows * 0.85
    written = reply["usage"]["cache_creation_input_tokens"]
    assert reply["usage"]["cache_creation"] == {"ephemeral_5m_input_tokens": written, "ephemeral_1h_input_tokens": 0}
    reply = talk.post({**body, "cache_control": lasting}, "/v1/messages")
    assert reply["figures"]["kept"]["tokens"] > rows * 0.9
    assert reply["figures"]["kept"]["seconds"] == 3600
    assert reply["usage"]["cache_creation"]["ephemeral_1h_input_tokens"] > 0


@pytest.mark.parametrize("fields", [{"ttl": 0.5}, {"ttl": 86_401}, {"ttl": "60"}, {"session": "A b"}, {"session": ""}])
def test_wrong_wishes_are_refused(served: Served, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "kvblend": fields}
    response = httpx.post(f"{served.url}{CHAT}", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, f"kvblend.{next(iter(fields))}")

"""A session that is deleted, whatever its requests do then: nothing of it serves a later prompt, and others keep theirs."""

import random
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from engines import FEW, Answer
from rooms import put, serving, settled

from blend.errors import StoreError
from blend.serve.events import Event, Finished, Output, Started
from blend.serve.request import Message, Request
from blend.serve.service import Service
from tests.towns import documents

WORDS = sorted({word for text in documents().values() for word in text.split() if word.isalpha()})


def some_text(seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=160))


SECRETS = count(1)
OTHERS = some_text(0)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("ended") / "store", model, prefix_budget=1 << 26) as service:
        yield service


class Secret:
    """What the session says, another text in each test."""

    text = ""


@pytest.fixture(autouse=True)
def new_secret() -> None:
    Secret.text = some_text(next(SECRETS))


def request(user: str = "ann", session: str = "mill", text: str = "") -> Request:
    messages = (Message("system", text or Secret.text), Message("user", "How many gates are there?"))
    return Request(messages, sampling=FEW, user=user, session=session)


def end(service: Service) -> None:
    service.end_session("", "ann", "mill")


def at(kind: type[Event], action: Callable[[], None], service: Service) -> None:
    """Ask, and do this in the engine's thread when the first event of this kind comes."""
    answer = Answer()
    pending = [action]

    def on_event(event: Event) -> None:
        if isinstance(event, kind) and pending:
            pending.pop()()
        answer(event)

    service.submit(request(), on_event)
    answer.wait()


def queued(service: Service) -> None:
    """The request waits behind another one when its session is deleted."""
    waiting = Answer()

    def submit() -> None:
        service.submit(request(), waiting)
        end(service)

    first = Answer()
    pending = [submit]

    def on_event(event: Event) -> None:
        if isinstance(event, Started) and pending:
            pending.pop()()
        first(event)

    service.submit(request("bob", "quay", OTHERS), on_event)
    first.wait()
    waiting.wait()


def prepared(service: Service) -> None:
    """Its prompt is made, pins included, and not yet submitted."""
    prompt = service.prepare(request())
    end(service)
    answer = Answer()
    service.take(service.compile(prompt), answer)
    answer.wait()


def learning(service: Service) -> None:
    """Its answer has ended, and its text may be computed in idle time."""
    put(service, request())
    end(service)


def twice(service: Service) -> None:
    put(service, request())
    settled(service)
    end(service)
    end(service)


def many_at_once(service: Service) -> None:
    """Four threads ask while the session is deleted again and again, and once more when they have asked."""
    answers = [Answer() for _ in range(4)]
    threads = [threading.Thread(target=service.submit, args=(request(), answer)) for answer in answers]
    for thread in threads:
        thread.start()
        end(service)
    for thread in threads:
        thread.join()
    end(service)
    for answer in answers:
        answer.wait()


STATES: dict[str, Callable[[Service], None]] = {
    "prepared": prepared,
    "queued": queued,
    "prefilled": lambda service: at(Started, lambda: end(service), service),
    "decoding": lambda service: at(Output, lambda: end(service), service),
    "ending": lambda service: at(Finished, lambda: end(service), service),
    "learning": learning,
    "deleted twice": twice,
    "many at once": many_at_once,
}


@pytest.mark.parametrize("state", STATES)
def test_nothing_of_a_deleted_session_serves_a_later_prompt(service: Service, state: str) -> None:
    for _ in range(2):  # so that nothing of these is new
        for user, session in (("bob", "mill"), ("ann", "quay")):
            put(service, request(user, session, OTHERS))
        settled(service)
    learned = service.tenant("").learned
    assert learned is not None
    before, pinned = len(learned), learned.pinned
    STATES[state](service)
    settled(service)
    assert len(learned) == before
    assert learned.pinned == pinned
    figures = put(service, request("ann", "weir")).figures
    assert figures.rows_reused < 40, "the beginning that all prompts have"
    assert figures.method == "full" or sum(part.tokens for part in figures.not_reused) > 100
    for user, session in (("bob", "mill"), ("ann", "quay")):
        figures = put(service, request(user, session, OTHERS)).figures
        assert figures.rows_reused > 100, "others keep theirs"


def test_a_session_that_begins_again_is_a_new_one(service: Service) -> None:
    at(Started, lambda: end(service), service)
    put(service, request())
    settled(service)
    assert put(service, request()).figures.rows_reused > 100


def test_an_unknown_session_takes_nothing(service: Service) -> None:
    put(service, request())
    settled(service)
    forgotten, row_bytes = service.end_session("", "ann", "lock")
    assert (forgotten.texts, forgotten.nbytes, row_bytes) == (0, 0, 0)
    forgotten, row_bytes = service.end_session("", "eve", "mill")
    assert (forgotten.texts, row_bytes) == (0, 0)
    assert put(service, request()).figures.rows_reused > 100


def test_a_deletion_fails_while_the_store_is_away_and_holds_behind_a_restart(tmp_path: Path, model: Path) -> None:
    store, away = tmp_path / "store", tmp_path / "away"
    with serving(store, model) as service:
        put(service, request())
        settled(service)
        store.rename(away)
        with pytest.raises(StoreError):
            end(service)
        away.rename(store)
        at(Started, lambda: end(service), service)
    with serving(store, model) as service:
        learned = service.tenant("").learned
        assert learned is not None
        assert (len(learned), learned.pinned) == (0, frozenset())

"""Answers compared with full recompute: at the client's wish, and a sample of all in idle time."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from changing import until
from engines import Answer
from rooms import QUESTION, ask, put, serving
from served import Served

from blend.compare import likely_kl
from blend.layout import PromptLayout
from blend.model.decoder import full_prefill
from blend.quality import RATIOS, Estimator, Signals
from blend.sampling import Sampling
from blend.serve.audit import Auditor
from blend.serve.events import Audit, Event, Figures, Finished, Output, Started, Token
from blend.serve.metrics import Metrics
from blend.serve.promises import Promises, promise_of
from blend.serve.prompt import Prompt
from blend.serve.request import Message, Request
from blend.serve.service import Service

SAMPLING = Sampling(max_tokens=12, ignore_eos=True)


def questions(service: Service, many: int) -> list[Request]:
    """Requests whose answers are blended."""
    towns = ("harbour", "market", "bridge", "tower", "mill", "quarry")
    said = [f"{QUESTION} Tell me of the {towns[number % 6]} {number}." for number in range(many)]
    return [Request((Message("user", one),), top_k=4, sampling=SAMPLING) for one in said]


def unlike(service: Service, many: int) -> list[Request]:
    """The same as token ids that begin unlike each other: what one leaves in the prefix cache serves no other."""
    prompts = [service.prepare(one).layout.token_ids for one in questions(service, many)]
    return [Request(prompt=(100 + number, *ids), sampling=SAMPLING) for number, ids in enumerate(prompts)]


def full_answer(service: Service, request: Request) -> list[int]:
    """What full recompute says."""
    return put(service, replace(request, method="full", cold=True)).tokens


@pytest.fixture
def service(store: Path, model: Path) -> Iterator[Service]:
    with serving(store, model, learn_budget=0) as made:
        yield made


def ends(answer: Answer) -> list[Finished]:
    return [event for event in answer.events if isinstance(event, Finished)]


@pytest.mark.parametrize("sampling", [SAMPLING, replace(SAMPLING, temperature=1.0, seed=5)])
def test_a_check_says_what_full_recompute_says(service: Service, sampling: Sampling) -> None:
    checks = []
    for request in questions(service, 6):
        request = replace(request, sampling=sampling)
        expected = full_answer(service, request)
        answer = put(service, replace(request, cold=True, verify=True))
        assert answer.figures.method == "blend"
        first, last = ends(answer)
        assert (first.last, first.check, last.last) == (False, None, True)
        check = last.check
        checks.append(check.verified)
        assert check.verified == (answer.tokens == expected)
        if not check.verified:
            assert answer.tokens[: check.first] == expected[: check.first]
            assert answer.tokens[check.first] != expected[check.first]
            tokenizer = service.tenant("").rag().decoder.tokenizer
            assert check.text == tokenizer.decode(expected, skip_special_tokens=True)
    assert not all(checks)  # else nothing was tested


OBJECT = {
    "type": "object",
    "properties": {"gates": {"enum": [1, 2, 3, 4]}, "open": {"type": "boolean"}},
    "required": ["gates", "open"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("form", [{"schema": OBJECT}, {"stop": ("a", "e")}])
def test_a_check_keeps_to_the_form_of_the_answer(service: Service, form: dict[str, Any]) -> None:
    ended = 0
    for request in unlike(service, 4):
        request = replace(request, sampling=Sampling(max_tokens=60, temperature=1.0, seed=3), **form)
        expected = full_answer(service, request)
        answer = put(service, replace(request, verify=True))
        assert answer.figures.method == "blend"
        check = ends(answer)[-1].check
        assert check.verified == (answer.tokens == expected)
        ended += ends(answer)[-1].reason == "stop"
    assert ended


def test_a_check_of_full_prefill_is_none_and_a_cold_one_leaves_nothing(service: Service) -> None:
    request = replace(questions(service, 1)[0], verify=True)
    before = service.engine.stats().prefix_bytes
    assert ends(put(service, replace(request, cold=True)))[-1].check is not None
    assert service.engine.stats().prefix_bytes == before
    check = ends(put(service, replace(request, method="full")))[-1].check
    assert (check.verified, check.reason) == (True, "computed in full")


def test_behind_another_answer_the_next_turn_goes_on_from_exact_rows(service: Service) -> None:
    checks = []
    for request in unlike(service, 6):
        first = put(service, replace(request, verify=True))
        assert first.figures.method == "blend"
        checks.append(ends(first)[-1].check.verified)
        ids = request.prompt
        assert isinstance(ids, tuple)
        later = put(service, replace(request, prompt=(*ids, *first.tokens, *ids[:40])))
        assert later.figures.rows_inexact == 0
        assert later.figures.rows_reused >= len(ids)
    assert not all(checks)  # else nothing was tested


def test_over_http(serve: Callable[..., Served]) -> None:
    served = serve()
    asked: dict[str, Any] = {"max_tokens": 8, "kvblend": {"verify": True, "retrieve": {"top_k": 4}}}
    asked["messages"] = [{"role": "user", "content": QUESTION}]
    whole = served.ask(**asked).json()
    check = whole["kvblend"]["check"]
    assert check["verified"] in (True, False)
    *lines, done = [line for line in served.ask(**asked, stream=True).text.split("\n") if line]
    *stream, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert done == "data: [DONE]"
    assert [one for one in stream if one["choices"][0]["finish_reason"]] == stream[-1:]
    streamed = last["kvblend"]["check"]  # behind the whole answer
    said = "".join(one["choices"][0]["delta"].get("content", "") for one in stream)
    assert streamed["verified"]  # the first check has left exact KV
    assert said == (whole["choices"][0]["message"]["content"] if check["verified"] else check["text"])
    body = {"input": QUESTION, "max_output_tokens": 8, "kvblend": asked["kvblend"]}
    assert served.send("POST", "/v1/responses", json=body).json()["kvblend"]["check"]["verified"] in (True, False)
    assert sum(count for name, count in served.counts().items() if name.startswith("checks_total{")) == 3


@pytest.fixture
def reports() -> list[Audit]:
    return []


@pytest.fixture
def audited(store: Path, model: Path, reports: list[Audit]) -> Iterator[Service]:
    """A service of which every answer is audited."""
    with serving(store, model, learn_budget=0, audit=1.0, on_audit=reports.append) as made:
        yield made


def test_audits_find_what_full_recompute_says(audited: Service, reports: list[Audit]) -> None:
    requests = questions(audited, 4)
    answers = [put(audited, request).tokens for request in requests]
    until(lambda: len(reports) == 4)
    # asked again, in full: full prefill is audited by nobody
    flipped = [full_answer(audited, one) != said for one, said in zip(requests, answers, strict=True)]
    assert [audit.flipped for audit in reports] == flipped
    assert all(audit.tokens == SAMPLING.max_tokens for audit in reports)
    assert max(audit.kl for audit in reports) > 0


def test_the_kl_of_an_audit_is_that_of_the_distributions(audited: Service, reports: list[Audit]) -> None:
    request = replace(questions(audited, 1)[0], sampling=replace(SAMPLING, max_tokens=1))
    answer = put(audited, request)
    until(lambda: bool(reports))
    prepared = audited.prepare(request)
    rag = audited.rag(prepared)
    blend, full = rag.blender.prefill(prepared.layout), full_prefill(rag.decoder, prepared.layout)
    p, q = (one.logits[0].float().log_softmax(-1) for one in (full, blend))
    exact = float((p.exp() * (p - q)).sum())
    listed = [dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)) for top in (p.topk(20), q.topk(20))]
    assert answer.figures.method == "blend"
    assert 0 < reports[0].kl <= exact + 1e-4
    assert reports[0].kl == pytest.approx(likely_kl(*listed), rel=0.02, abs=1e-7)


def test_an_audit_is_of_the_first_of_several_answers_drawn_again_with_its_seed(
    audited: Service, reports: list[Audit], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = Mock(side_effect=audited.engine.submit)
    monkeypatch.setattr(audited.engine, "submit", submit)
    sampling = replace(SAMPLING, temperature=1.0)
    request = questions(audited, 1)[0]
    said = put(audited, replace(request, sampling=replace(sampling, n=2))).tokens_of(0)
    until(lambda: bool(reports))
    seeds = {call.args[0].sampling.seed for call in submit.call_args_list}
    assert (submit.call_count, len(seeds)) == (3, 1)
    again = replace(request, sampling=replace(sampling, seed=seeds.pop()))
    assert put(audited, again).tokens == said
    assert (reports[0].tokens, reports[0].flipped) == (SAMPLING.max_tokens, said != full_answer(audited, again))


def test_an_audit_ends_where_the_answer_can_no_longer_be_blended() -> None:
    auditor = Auditor(1.0, lambda audit: None)
    watched = auditor.watched(Prompt.of(PromptLayout((1,), (), (2,))), lambda event: None)
    for event in (Started(Figures("blend", "", 9, 4)), Output((Token(5),)), Finished("stop")):
        watched(event)
    again = auditor.next()
    for event in (Started(Figures("full", "cold", 9, 9)), Output((Token(5),)), Finished("stop")):
        again[1](event)
    assert auditor.next() is None


def audits(
    kl: Sequence[float], target: float | None = 0.05, *, flips: int = 0, share: float | None = None
) -> list[Audit]:
    quality = {"kl": 0.01, "target": target, "flips": share, "ratio": 0.05, "prompts": 40}
    return [Audit("tenant", "corpus", 32, place < flips, one, quality) for place, one in enumerate(kl)]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        pytest.param(audits([0.02, 0.04] * 10), True, id="below the target"),
        pytest.param(audits([0.08, 0.1] * 10), False, id="above the target"),
        pytest.param(audits([0.0, 0.0, 0.0, 0.3] * 4), True, id="the interval holds the target"),
        pytest.param(audits([0.08, 0.1] * 3), True, id="too few"),
        pytest.param(audits([0.0] * 40, None, flips=1, share=0.02), True, id="few flips"),
        pytest.param(audits([0.0] * 40, None, flips=10, share=0.02), False, id="many flips"),
    ],
)
def test_a_promise_is_broken_if_audits_are_above_its_target(given: list[Audit], kept: bool) -> None:
    assert promise_of(given).kept == kept


def test_a_request_that_asks_for_less_hides_nothing() -> None:
    """And one that was audited too rarely is not shown."""
    mixed = promise_of([*audits([0.08, 0.1] * 10), *audits([0.1] * 20, 5.0), *audits([0.01] * 2, 0.001)])
    assert not mixed.kept
    assert (mixed.figures["kl"].target, mixed.figures["kl"].answers) == (0.05, 20)


def test_log_and_metrics_say_when_a_promise_breaks_and_is_kept_again(caplog: pytest.LogCaptureFixture) -> None:
    promises, metrics = Promises(), Metrics()
    with caplog.at_level("INFO", logger="kvblend.serve"):
        for audit in audits([0.2, 0.3] * 8):
            metrics.audited(promises.judged(audit))
        page = metrics.page().decode()
        for audit in audits([0.001] * 256):
            promises.judged(audit)
    said = [(record.message, record.tenant, record.corpus) for record in caplog.records]  # type: ignore[attr-defined]
    assert said == [("promise_broken", "tenant", "corpus"), ("promise_kept", "tenant", "corpus")]
    assert 'kvblend_promise_kept{corpus="corpus",tenant="tenant"} 0.0' in page
    assert 'kvblend_promised_kl{bound="target",corpus="corpus",tenant="tenant"} 0.05' in page
    assert "kvblend_promised_flips{" not in page


def test_nothing_is_promised_where_nothing_was_asked_for() -> None:
    assert Promises().judged(Audit("tenant", "corpus", 32, False, 9.0)).promise is None


def test_an_audit_judges_the_promise_of_its_corpus(audited: Service, reports: list[Audit]) -> None:
    signals = tuple((Signals(0.5, 0.001 * 1.3**i),) * len(RATIOS) for i in range(20))
    modest = Estimator(signals, ((1e-9,) * len(RATIOS),) * 20, ((False,) * len(RATIOS),) * 20)
    request = replace(questions(audited, 1)[0], quality=0.5)
    blender = audited.tenant("").rag().blender
    library = blender.library(audited.prepare(request).layout.kept_behind)
    library.store.write_artifact(library.isolated.identity.quality_name, modest.to_bytes())
    said = put(audited, request)
    until(lambda: bool(reports))
    assert said.figures.quality is not None
    assert reports[0].quality == said.figures.quality
    assert reports[0].promise is not None


def test_no_more_than_the_share_is_audited(store: Path, model: Path) -> None:
    reports: list[Audit] = []
    with serving(store, model, learn_budget=0, audit=0.0, on_audit=reports.append) as service:
        ask(service, QUESTION, top_k=4)
        put(service, replace(questions(service, 1)[0], verify=True))
        assert not reports


@pytest.mark.parametrize("how", ["cancelled", "shutdown"])
def test_an_answer_whose_check_ends_early_is_whole(service: Service, how: str) -> None:
    request = replace(questions(service, 1)[0], verify=True, sampling=replace(SAMPLING, max_tokens=3))
    answer, closing = Answer(), threading.Thread(target=service.engine.close)

    def take(event: Event) -> None:
        """In the engine's thread, which submits the check behind the first end."""
        answer(event)
        if isinstance(event, Finished) and not event.last:
            if how == "cancelled":
                request.cancelled.set()
            else:
                closing.start()
                time.sleep(0.5)

    service.submit(request, take)
    first, last = ends(answer.wait())
    assert first == Finished("length", last=False)
    assert last == Finished("length", check=last.check)
    assert (last.check.verified, last.check.tokens) == (None, 0)
    assert last.check.reason == how or how == "shutdown"
    assert len(answer.tokens) == 3

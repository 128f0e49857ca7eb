"""What full prefill takes: measured, and estimated."""

import time
from pathlib import Path

import pytest
from changing import until
from rooms import QUESTION, serving
from rooms import ask as ask_service

from blend.serve import service as services
from blend.serve.service import Service


def test_an_estimate_is_called_one_until_full_prefill_of_the_prompt_was_measured(service: Service) -> None:
    before = ask_service(service, QUESTION, top_k=3).figures
    assert before.full_measured_s is None
    assert before.full_estimated_s is not None
    assert before.full_estimated_s > 0
    full = ask_service(service, QUESTION, top_k=3, method="full", cold=True).figures
    assert full.full_measured_s == pytest.approx(full.ttft_s - full.waited_s)
    assert full.full_estimated_s is None
    again = ask_service(service, QUESTION, top_k=3).figures
    assert (again.method, again.full_measured_s, again.full_estimated_s) == ("blend", full.full_measured_s, None)
    other = ask_service(service, QUESTION, top_k=2).figures
    assert other.full_measured_s is None
    assert other.full_estimated_s is not None


def test_what_was_measured_for_a_tenant_serves_no_other(service: Service) -> None:
    documents = {"method": "full", "cold": True, "tenant": "one"}
    ask_service(service, QUESTION, **documents)
    assert ask_service(service, QUESTION, tenant="one").figures.full_measured_s is not None
    assert ask_service(service, QUESTION, tenant="two").figures.full_measured_s is None


def test_full_prefill_is_timed_again_while_the_server_is_idle(
    store: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs had the machine when the server started: the first timing is a hundred times too long."""
    monkeypatch.setattr(services, "TIMED_EVERY_S", 0.05)
    with serving(store, model, timing_s=1000.0) as service:
        time.sleep(0.5)
        first = ask_service(service, QUESTION, top_k=3).figures.full_estimated_s
        assert first is not None
        assert first > 100, "nothing is timed before a question has come"
        until(lambda: 0 < (ask_service(service, QUESTION, top_k=3).figures.full_estimated_s or 0.0) < 10)

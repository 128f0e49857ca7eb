"""The comparison by which a model is admitted: what vLLM is asked for it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from blend.integrations.vllm.contract import Signer
from blend.integrations.vllm.middleware import reason_against

CHECKS = [{"prompt": [1, 2, 3], "right": "r" * 32, "wrong": "w" * 32}]
SIGNER = Signer(b"a secret")


class Engine:
    """vLLM's client: its log-probabilities differ where KV of the wrong ticket is taken up."""

    def __init__(self, most: int, right: float = 0.0, wrong: float = 1.0) -> None:
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_logprobs=most))
        self.asked: list[int] = []
        self._off = {"r" * 32: right, "w" * 32: wrong}

    async def generate(self, prompt: Any, sampling: Any, name: str) -> AsyncIterator[Any]:
        given = (sampling.extra_args or {}).get("kv_transfer_params")
        ticket = given and SIGNER.ticket(given["kvblend"], prompt.cache_salt)
        assert bool(ticket) == bool(given), "a scheduler would refuse it"
        self.asked.append(sampling.logprobs)
        logprobs = {token: SimpleNamespace(logprob=-token - self._off.get(ticket, 0.0)) for token in range(5)}
        yield SimpleNamespace(outputs=[SimpleNamespace(logprobs=[logprobs])])


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    found, inputs = ModuleType("vllm"), ModuleType("vllm.inputs")
    found.SamplingParams = inputs.TokensPrompt = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", found)
    monkeypatch.setitem(sys.modules, "vllm.inputs", inputs)


@pytest.mark.parametrize(("most", "asked"), [(20, 10), (10, 10), (5, 5), (0, 0), (-1, 10)])
def test_no_more_is_asked_than_the_server_allows(most: int, asked: int) -> None:
    engine = Engine(most)
    assert asyncio.run(reason_against(engine, CHECKS, SIGNER)) == ""
    assert engine.asked == [asked] * 3


def test_what_is_told_against_a_model() -> None:
    off = asyncio.run(reason_against(Engine(20, right=0.5), CHECKS, SIGNER))
    assert "off by 0.5 in prompt 1 of 1, over wrong KV by 1" in off
    assert "does not take the KV" in asyncio.run(reason_against(Engine(20, wrong=0.0), CHECKS, SIGNER))

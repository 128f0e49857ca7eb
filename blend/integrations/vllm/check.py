"""Whether KV of the prefill process means to vLLM's model what its own means: a few log-probabilities, compared once a model.

Three answers to each of a few random prompts: by vLLM's own prefill, over exact KV from the prefill process, and over KV that
is wrong. The second must be much nearer to the first than the third is; if it is not, rotary layouts or weights differ.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from blend.integrations.vllm.signature import Signer

NEARER = 10  # times; rounding of 16 bits is a hundred times nearer than wrong KV, other rotations are not nearer at all
_TOP = 10


async def reason_against(engine: Any, checks: Sequence[Mapping[str, Any]], signer: Signer) -> str:
    """One line for why blended KV must not be used, or "". engine: vLLM's client of its own engine."""
    for number, check in enumerate(checks):
        own, right, wrong = await asyncio.gather(
            *(_likeliest(engine, check["prompt"], ticket, signer) for ticket in (None, check["right"], check["wrong"]))
        )
        if distance(own, wrong) == 0:
            return (
                "vLLM does not take the KV that it is handed: start it with the connector in --kv-transfer-config and the same "
                "socket"
            )
        if distance(own, right) * NEARER > distance(own, wrong):
            return (
                f"over KV of the prefill process vLLM's log-probabilities are off by {distance(own, right):.3g} in prompt "
                f"{number + 1} of {len(checks)}, over wrong KV by {distance(own, wrong):.3g}: give both the same model"
            )
    return ""


async def _likeliest(engine: Any, prompt: list[int], ticket: str | None, signer: Signer) -> dict[int, float]:
    """The likeliest next tokens and their log-probabilities."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    name, allowed = secrets.token_hex(8), engine.vllm_config.model_config.max_logprobs
    more = {"kv_transfer_params": signer.signed(ticket, name)} if ticket else None
    top = _TOP if allowed < 0 else min(_TOP, allowed)  # below 0: as many as there are
    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=top, extra_args=more)
    last = None
    async for output in engine.generate(
        TokensPrompt(prompt_token_ids=prompt, cache_salt=name), sampling, f"kvblend-{name}"
    ):
        last = output
    assert last is not None
    return {token: found.logprob for token, found in last.outputs[0].logprobs[0].items()}


def distance(some: Mapping[int, float], others: Mapping[int, float]) -> float:
    """Mean difference of log-probabilities; what is missing on one side is taken for its least likely one."""
    least, lowest = min(some.values()), min(others.values())
    tokens = {*some, *others}
    return sum(abs(some.get(token, least) - others.get(token, lowest)) for token in tokens) / len(tokens)

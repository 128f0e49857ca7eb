"""The connector inside vLLM: greedy tokens over blended KV are those of kvblend's own decoding, whatever else happens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from offline import COUNT, Engine, salt, started
from tiny import Bench, bench, save_model

from blend.integrations.vllm.contract import LoadScheduler, Signer

pytestmark = pytest.mark.inside_vllm
LENGTHS = (127, 128, 129, 517)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def held(model: Path) -> Iterator[Bench]:
    with bench(model) as found:
        yield found


@pytest.fixture(scope="module")
def engine(model: Path, held: Bench) -> Iterator[Engine]:
    """One for all tests that need no other, in this process: it starts more quickly."""
    from vllm import envs

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        found = Engine(model, {"socket": held.socket})
    envs.disable_envs_cache()  # or the next engine would be in this process too
    yield found
    found.close()


def check_all_lengths(held: Bench, engine: Engine) -> None:
    layouts = [held.layout(rows, rows) for rows in LENGTHS]
    full = [held.full(layout, COUNT) for layout in layouts]
    assert engine.tokens([(layout, None, None) for layout in layouts]) == full
    exact = [held.blended(layout, 1.0) for layout in layouts]
    assert engine.tokens([(one.layout, held.hold(one), salt()) for one in exact]) == full
    blends = [held.blended(layout, 0.15) for layout in layouts]
    expected = [held.greedy(one, COUNT) for one in blends]
    assert all(found != wanted for found, wanted in zip(expected, full, strict=True))  # or nothing could be seen
    assert engine.tokens([(one.layout, held.hold(one), salt()) for one in blends]) == expected
    alone = [engine.tokens([(one.layout, held.hold(one), salt())])[0] for one in blends]
    assert alone == expected
    mixed = [(one.layout, held.hold(one), salt()) for one in blends] + [(one.layout, None, None) for one in blends]
    assert engine.tokens(mixed) == expected + full


def test_around_block_boundaries_during_the_batch(held: Bench, engine: Engine) -> None:
    check_all_lengths(held, engine)


def test_around_block_boundaries_before_the_batch(held: Bench, model: Path) -> None:
    with started(model, held.socket, load="sync") as engine:
        check_all_lengths(held, engine)
        check_failures(held, engine)


def test_too_few_blocks(held: Bench, model: Path) -> None:
    """Requests are preempted and their KV is asked for again."""
    blends = [held.blended(held.layout(rows, rows), 0.15) for rows in (300, 410, 517)]
    count = 200
    expected = [held.greedy(one, count) for one in blends]
    with started(model, held.socket, num_gpu_blocks_override=14, disable_log_stats=False) as engine:
        outputs = engine.outputs([(one.layout, held.hold(one), salt()) for one in blends * 2], count)
        preempted = [one for one in engine.llm.get_metrics() if one.name == "vllm:num_preemptions"]
    assert sum(one.value for one in preempted) > 0
    assert [list(one.outputs[0].token_ids) for one in outputs] == expected * 2


def test_a_plain_prompt_after_a_blended_one(held: Bench, engine: Engine) -> None:
    layout = held.layout(400, 4)
    blend = held.blended(layout, 0.15)
    plain, blended = held.full(layout, COUNT), held.greedy(blend, COUNT)
    given = held.hold(blend)
    assert engine.tokens([(layout, given, "salted")]) == [blended]
    assert engine.tokens([(layout, None, None)]) == [plain]
    assert engine.tokens([(layout, None, "salted")]) == [blended]  # its blocks are in the prefix cache, for its like
    fresh = held.layout(400, 5)
    unsalted = held.hold(held.blended(fresh, 0.15))
    assert engine.tokens([(fresh, unsalted, None)]) == [held.full(fresh, COUNT)]  # not taken up: it would poison others


def test_the_rule_keeps_plain_prompts_right(held: Bench, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a salt vLLM's prefix cache gives blended blocks to a plain prompt of the same tokens: a wrong answer."""

    def without_rule(self: LoadScheduler, request: Any) -> str | None:
        return (request.kv_transfer_params or {}).get("kvblend", {}).get("ticket")

    monkeypatch.setattr(LoadScheduler, "ticket", without_rule)
    layout = held.layout(400, 6)
    blend = held.blended(layout, 0.15)
    plain, blended = held.full(layout, COUNT), held.greedy(blend, COUNT)
    assert engine.tokens([(layout, held.hold(blend), None)]) == [blended]
    assert engine.tokens([(layout, None, None)]) != [plain]


def check_failures(held: Bench, engine: Engine) -> None:
    layouts = [held.layout(rows, 60 + rows) for rows in (129, 300)]
    full = [held.full(layout, COUNT) for layout in layouts]
    gone = "0" * 32
    assert engine.tokens([(layout, gone, salt()) for layout in layouts]) == full
    other = held.hold(held.blended(held.layout(300, 99), 0.15))
    assert engine.tokens([(layouts[1], other, salt())]) == full[1:]  # KV of another prompt
    blend = held.blended(layouts[0], 0.15)
    both = [(layouts[0], held.hold(blend), salt()), (layouts[1], gone, salt())]
    assert engine.tokens(both) == [held.greedy(blend, COUNT), full[1]]


def test_loads_that_fail(held: Bench, engine: Engine) -> None:
    check_failures(held, engine)


def test_in_bfloat16_within_a_kl(model: Path) -> None:
    """Both round, each in its own way: vLLM's next token is as near to kvblend's over blended KV as over its own."""
    with bench(model, dtype=torch.bfloat16) as held:
        layouts = [held.layout(rows, rows) for rows in LENGTHS]
        plain = [held.blender.prefill(layout.all_plain()) for layout in layouts]
        blends = [held.blended(layout, 0.15) for layout in layouts]
        with started(model, held.socket, dtype="bfloat16", max_logprobs=-1) as engine:
            over_plain = engine.outputs([(layout, None, None) for layout in layouts], 1, logprobs=-1)
            given = [(one.layout, held.hold(one), salt()) for one in blends]
            over_blended = engine.outputs(given, 1, logprobs=-1)
    rounding = [divergence(*pair) for pair in zip(plain, over_plain, strict=True)]
    found = [divergence(*pair) for pair in zip(blends, over_blended, strict=True)]
    apart = [divergence(*pair) for pair in zip(plain, over_blended, strict=True)]
    assert max(found) < 3 * max(rounding)
    assert min(apart) > 10 * max(found)  # or nothing could be seen


def divergence(own: Any, theirs: Any) -> float:
    """KL divergence, in nats, of vLLM's next token from kvblend's."""
    likeliest = theirs.outputs[0].logprobs[0]
    mine = own.logits[-1].float().log_softmax(-1)
    other = torch.tensor([likeliest[token].logprob for token in range(mine.shape[-1])])
    return float((mine.exp() * (mine - other)).sum())


def test_log_probabilities_of_the_prompt_are_vllms_own(held: Bench, engine: Engine) -> None:
    layout = held.layout(200, 6)
    given = held.hold(held.blended(layout, 0.15))
    output = engine.outputs([(layout, given, salt())], prompt_logprobs=1)[0]
    assert list(output.outputs[0].token_ids) == held.full(layout, COUNT)
    assert len(output.prompt_logprobs) == layout.rows


@pytest.mark.parametrize(
    "nonsense",
    [
        *({"kvblend": "/etc/passwd"}, {"kvblend": {"ticket": "../x"}}, {"kvblend": None}, {}),
        *({"kvblend": {"ticket": "{}"}}, {"kvblend": {"ticket": "0" * 32, "signature": "0" * 64}}),
        *(Signer(b"another").signed("{}", "salt"), "{}"),  # the last is signed: a ticket for another stage
    ],
)
def test_parameters_that_are_no_tickets(held: Bench, engine: Engine, nonsense: Any) -> None:
    layout = held.layout(140, 7)
    assert engine.tokens([(layout, nonsense, salt())]) == [held.full(layout, COUNT)]

"""Tickets, what the scheduler makes of them, what the connector refuses, and the comparison that admits a model."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from layouts import marked

from blend.errors import ConfigError
from blend.integrations.vllm.contract import (
    LayoutTicket,
    Load,
    LoadFailedError,
    LoadScheduler,
    Signer,
    Site,
    distance,
    reason_against,
    refuse,
    refuse_version,
    rows_options,
)
from blend.integrations.vllm.prompts import blended
from blend.integrations.vllm.stage import CopyStage, LoadRunner, RowStage, stage_of
from blend.types import PromptLayout

NAME, SALT = "f" * 32, "salt"
LAYOUTS = {
    "chunks": PromptLayout.of_chunks((1, 2), ((3,), (4, 5), (6, 7, 8)), (9,)),
    "no chunks": PromptLayout.of_chunks((1, 2), (), (9, 10)),
    "plain, parts and a canonical prefix": marked(
        PromptLayout.of_chunks((1, 2), ((3,), (4, 5), (6, 7)), (9,), (1,)), plain={1}, parts={2: ((5, 6, 7, 8), 1)}
    ),
    "learned and new text": marked(PromptLayout.of_chunks((1, 2), ((3,), (4, 5)), (9,)), learned={0}, new={1}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_ticket_and_the_tokens_are_the_layout(name: str) -> None:
    layout = LAYOUTS[name]
    for one in (LayoutTicket(layout), LayoutTicket(layout, "towns", 0.05, "ada")):
        assert LayoutTicket.read(one.ticket(), layout.token_ids) == one


@pytest.mark.parametrize(
    "ticket",
    [
        *("", "{}", "[]", "7", NAME, "[1,1]", '[[],[],[],null,"",null,""]'),
        *('[[2,99],["new"],[],null,"",null,""]', '[[-1,1],["new"],[],null,"",null,""]'),
        *('[[1,1],["new"],[],null,"../x",null,""]', '[[1,1],["new"],[],null,"","0.1",""]'),
        *('[[1,1],["old"],[],null,"",null,""]', '[[1,1],[],[],null,"",null,""]', '[[1,1],7,[],null,"",null,""]'),
        '[[1,1],["new"],[],null,"",null,7]',
    ],
)
def test_a_ticket_of_another_prompt_is_refused(ticket: str) -> None:
    with pytest.raises(ValueError, match="no prompt of these tokens"):
        LayoutTicket.read(ticket, (1, 2, 3))


def test_only_the_same_blend_has_the_same_salt() -> None:
    one, other = LAYOUTS["chunks"], LAYOUTS["no chunks"]
    found = {LayoutTicket(one).salt("1"), LayoutTicket(one).salt("2"), LayoutTicket(other).salt("1")}
    assert len({*found, LayoutTicket(one, "towns").salt("1"), LayoutTicket(one, user="ada").salt("1")}) == 5
    assert LayoutTicket(one).salt("1") in found


def config(engine: str = "an engine", **options: str) -> Any:
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=engine, kv_connector_extra_config=options))


def request(given: Any, **more: Any) -> Any:
    found = {
        "request_id": "r",
        "kv_transfer_params": given,
        "cache_salt": SALT,
        "lora_request": None,
        "prompt_token_ids": list(range(40)),
        "num_prompt_tokens": 40,
        "sampling_params": SimpleNamespace(prompt_logprobs=None),
    }
    return SimpleNamespace(**{**found, **more})


@pytest.fixture
def signer() -> Signer:
    return Signer.of(config())


@pytest.fixture
def scheduler(signer: Signer) -> LoadScheduler:
    return LoadScheduler(signer)


@pytest.mark.parametrize("ticket", [NAME, "[[1]]"])
@pytest.mark.parametrize("asked", [{}, {"cache_salt": "\ud800"}])
def test_a_ticket_of_the_middleware_becomes_a_load(scheduler: LoadScheduler, ticket: str, asked: Any) -> None:
    """Whatever salt, which is mixed in, a client brings."""
    server = Signer.of(config())  # in another process
    body = blended(asked, [1], {"ticket": ticket, "salt": "s"}, "/v1/chat/completions", server)
    found = request(body["kv_transfer_params"], cache_salt=body["cache_salt"])
    assert scheduler.ticket(found) == ticket
    assert scheduler.rows(found, 16) == 23
    scheduler.allocated(found, (1, 2, 3), 23)
    assert scheduler.taken() == (Load("r", ticket, tuple(range(40)), (1, 2, 3), 16, 39),)
    assert scheduler.taken() == ()
    scheduler.failed({"r"})
    assert scheduler.rows(found, 16) == 0, "vLLM computes what failed once"
    scheduler.finished(found)
    assert scheduler.rows(found, 0) == 39


FORGED: tuple[Any, ...] = (
    *("nonsense", [1], {"kvblend": "nonsense"}, {"kvblend": {}}, {"kvblend": {"ticket": "{}"}}),
    *({"kvblend": {"ticket": NAME}}, {"kvblend": {"ticket": NAME, "signature": "0" * 64}}),
    *({"kvblend": {"ticket": "\ud800", "signature": "0"}}, {"kvblend": {"ticket": NAME, "signature": "\ud800"}}),
    *({"kvblend": {"ticket": NAME, "signature": "\u00e9"}}, {"kvblend": {"ticket": 1, "signature": 1}}),
    *(Signer(b"another").signed(NAME, SALT), Signer.of(config("other")).signed(NAME, SALT)),
    Signer.of(config()).signed(NAME, "another salt"),
)


@pytest.mark.parametrize("given", FORGED)
def test_forged_tickets_are_refused(scheduler: LoadScheduler, given: Any) -> None:
    assert scheduler.rows(request(given), 0) == 0


def test_a_refusal_is_logged_once(scheduler: LoadScheduler, signer: Signer, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = request(signer.signed(NAME, SALT)), request({"kvblend": {"ticket": NAME}})
    with caplog.at_level(logging.WARNING, "vllm.kvblend"):
        for one in (bad, bad, good, bad):
            scheduler.rows(one, 0)
    assert [record.getMessage()[:32] for record in caplog.records] == ["kvblend: a ticket is refused tha"] * 2
    assert scheduler.refused == {"r"}
    scheduler.finished(bad)
    assert scheduler.refused == set()


@pytest.mark.parametrize(
    "more",
    [
        *({"cache_salt": salt} for salt in (None, "", "\ud800", 7, 7.5, True, ["salt"], {"salt": 1})),
        {"lora_request": "adapter"},
        {"prompt_token_ids": None},
        {"sampling_params": SimpleNamespace(prompt_logprobs=0)},
        {"sampling_params": None},
    ],
)
def test_good_tickets_of_unfit_requests(scheduler: LoadScheduler, signer: Signer, more: dict[str, Any]) -> None:
    for salt in (SALT, ""):
        found = request(signer.signed(NAME, salt), **more)
        assert scheduler.rows(found, 0) == 0
        scheduler.allocated(found, (1, 2, 3), 23)
        assert not scheduler.taken()


def test_engines_of_one_server_know_each_others_signatures_and_none_is_without_a_secret(signer: Signer) -> None:
    """With data parallelism vLLM appends the engine's number to its id, once or twice."""
    given = signer.signed(NAME, SALT)["kvblend"]
    for number in ("_dp0", "_dp1_dp1"):
        assert Signer.of(config(f"an engine{number}")).ticket(given, SALT) == NAME
    with pytest.raises(ConfigError, match="this engine has no id"):
        Signer.of(config(""))
    without = SimpleNamespace(kv_transfer_config=None)
    assert Signer.of(without).ticket(Signer.of(without).signed(NAME, SALT)["kvblend"], SALT) is None


def test_each_stage_has_its_own_options() -> None:
    assert stage_of({}) is stage_of({"stage": "copied", "socket": "@x", "load": "sync"}) is CopyStage
    assert stage_of({"stage": "rows", "store": "kv", "ratio": 0.2}) is RowStage
    for options, why in (
        ({"stage": "rows", "socket": "@x"}, "stage rows has no option 'socket'"),
        ({"store": "kv"}, "stage copied has no option 'store'"),
        ({"stage": "row"}, "there is no stage 'row'; choose copied or rows"),
        ({"load": "later"}, "load is 'later'; choose async or sync"),
    ):
        with pytest.raises(ValueError, match=why):
            stage_of(options)
    assert rows_options(config(stage="rows", store="kv")) == {"stage": "rows", "store": "kv"}
    assert rows_options(config()) is rows_options(SimpleNamespace(kv_transfer_config=None)) is None


def test_layers_that_read_the_cache_of_others_are_not_filled() -> None:
    layers = tuple(SimpleNamespace(kv_sharing_target_layer_name=name) for name in (None, None, "layers.0", "layers.1"))
    assert Site(None, ("layers.0", "layers.1", "layers.2", "layers.3"), layers, 16).kept == (0, 1)
    assert Site(None, ("layers.0",), (SimpleNamespace(),), 16).kept == (0,)


def test_rows_refuse_more_than_one_worker() -> None:
    model = SimpleNamespace(is_multimodal_model=False)
    for world, data in ((2, 1), (1, 2), (2, 2)):
        parallel = SimpleNamespace(world_size=world, data_parallel_size=data)
        several = SimpleNamespace(
            parallel_config=parallel, model_config=model, lora_config=None, speculative_config=None
        )
        with pytest.raises(ValueError, match=r"because the model has more than one worker; use stage copied$"):
            RowStage(SimpleNamespace(config=several, layers=(), block_size=16), {"store": "s"})  # type: ignore[arg-type]


class Filling:
    """A stage that remembers, and fails for a prompt that begins with 0."""

    unfinished = True

    def __init__(self) -> None:
        self.filled, self.rested = list[str](), list[bool]()

    def fill(self, load: Load) -> Mapping[str, Any] | None:
        if load.token_ids[0] == 0:
            raise LoadFailedError("it cannot")
        self.filled.append(load.request)
        return {"rows": 3}

    def rest(self, *, alone: bool) -> None:
        self.rested.append(alone)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("apart", [True, False])
def test_the_runner_reports_what_became_of_each_load(apart: bool, caplog: pytest.LogCaptureFixture) -> None:
    stage = Filling()
    runner = LoadRunner(stage, 16, apart=apart)  # type: ignore[arg-type]
    runner.start(Load("good", NAME, (1,) * 40, (3, 4, 5), 0, 39))
    for name in ("bad", "worse"):
        runner.start(Load(name, NAME, (0,) * 40, (6, 7, 8), 16, 39))
    runner.rest(alone=True)
    assert runner.unfinished == (not apart)
    runner.close()
    done = runner.done()
    assert done.failed == {"bad": {7, 8}, "worse": {7, 8}}
    assert done.figures == {"good": {"rows": 3}}
    assert stage.rested == ([] if apart else [True])
    assert not runner.done().failed, "each is reported once"
    assert caplog.text.count("it cannot") == 1, "one line an outage"


class FullAttentionSpec:
    """As vLLM describes a layer's cache; the class goes by its name."""

    def __init__(self, **more: int) -> None:
        self.sliding_window = more.get("sliding_window")
        self.attention_chunk_size = more.get("attention_chunk_size")


class SlidingWindowSpec:
    sliding_window = 64


class MambaSpec:
    pass


def checked(*specs: Any, **changes: Any) -> None:
    settings = {
        "model_config": SimpleNamespace(use_mla=False, is_encoder_decoder=False),
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "kv_transfer_config": SimpleNamespace(kv_role="kv_consumer", kv_load_failure_policy="recompute"),
        "lora_config": None,
        "speculative_config": None,
    }
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    refuse(SimpleNamespace(**settings | changes), SimpleNamespace(kv_cache_groups=groups))


def test_full_attention_in_a_known_version_is_served() -> None:
    for version in ("0.32.0", "0.32.1+cpu"):
        refuse_version(version)
    for version in ("0.31.1", "0.33.0", "0.3.2", "1.0"):
        with pytest.raises(ValueError, match=rf"^kvblend: vLLM {version} is not supported; install 0.32$"):
            refuse_version(version)
    checked(FullAttentionSpec())


FULL, WINDOWS = FullAttentionSpec(), "models with sliding windows or chunked attention are not supported"
REFUSED: tuple[tuple[tuple[Any, ...], dict[str, Any], str], ...] = (
    # After a load that failed it goes on counting the rows as computed: a wrong answer.
    ((FULL,), {"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
    # With a connector vLLM has no hybrid cache manager: windows become full caches.
    ((FullAttentionSpec(sliding_window=64),), {}, WINDOWS),
    ((FullAttentionSpec(attention_chunk_size=64),), {}, WINDOWS),
    ((SlidingWindowSpec(),), {}, WINDOWS),
    ((MambaSpec(),), {}, "several kinds of KV cache"),
    ((FULL, FULL), {}, "several kinds of KV cache"),
    ((FULL,), {"lora_config": "adapters"}, "--enable-lora"),
    ((FULL,), {"speculative_config": "drafts"}, "--speculative-config"),
    ((FULL,), {"cache_config": SimpleNamespace(cache_dtype="fp8")}, "--kv-cache-dtype auto"),
    ((FULL,), {"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, "use tensor or data parallelism"),
    (
        (FULL,),
        {"kv_transfer_config": SimpleNamespace(kv_role="kv_consumer", kv_load_failure_policy="fail")},
        '"kv_load_failure_policy": "recompute"',
    ),
)


@pytest.mark.parametrize(("specs", "changes", "words"), REFUSED)
def test_what_was_never_shown_right_is_refused(specs: tuple[Any, ...], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^kvblend: .*{words}"):
        checked(*specs, **changes)


CHECKS = [{"prompt": [1, 2, 3], "right": "r" * 32, "wrong": "w" * 32}]
SIGNER = Signer(b"a secret")


class Engine:
    """vLLM's client: its log-probabilities differ where KV of the wrong ticket is loaded."""

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


@pytest.fixture
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    found, inputs = ModuleType("vllm"), ModuleType("vllm.inputs")
    found.SamplingParams = inputs.TokensPrompt = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", found)
    monkeypatch.setitem(sys.modules, "vllm.inputs", inputs)


@pytest.mark.usefixtures("_vllm")
@pytest.mark.parametrize(("most", "asked"), [(20, 10), (10, 10), (5, 5), (0, 0), (-1, 10)])
def test_the_comparison_asks_no_more_than_the_server_allows(most: int, asked: int) -> None:
    engine = Engine(most)
    assert asyncio.run(reason_against(engine, CHECKS, SIGNER)) == ""
    assert engine.asked == [asked] * 3


@pytest.mark.usefixtures("_vllm")
def test_reasons_against_a_model() -> None:
    off = asyncio.run(reason_against(Engine(20, right=0.5), CHECKS, SIGNER))
    assert "off by 0.5 in prompt 1 of 1, over wrong KV by 1" in off
    assert "does not take the KV" in asyncio.run(reason_against(Engine(20, wrong=0.0), CHECKS, SIGNER))


def test_distances_of_log_probabilities() -> None:
    some = {1: -0.1, 2: -3.0}
    assert distance(some, some) == 0
    assert distance(some, {1: -0.1, 3: -4.0}) == pytest.approx((0 + 1.0 + 1.0) / 3)

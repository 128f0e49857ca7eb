"""Tickets, what the scheduler makes of them, what the connector refuses, and the order of loads."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layouts import marked

from blend.errors import ConfigError
from blend.integrations.vllm.contract import (
    LayoutTicket,
    Load,
    LoadScheduler,
    Signer,
    connector_options,
    refuse,
    refuse_version,
)
from blend.integrations.vllm.loads import LoadQueue, Passes, check_options, row_model
from blend.integrations.vllm.prompts import blended
from blend.integrations.vllm.workers import ColdError, LoadFailedError, WorkerGroup
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
    assert scheduler.rows(found, 16) == 24, "with the last row, which vLLM computes"
    scheduler.allocated(found, (1, 2, 3), 24)
    assert scheduler.step().loads == (Load("r", ticket, tuple(range(40)), (1, 2, 3), 16, 39),)
    assert scheduler.step().loads == ()
    scheduler.ended({"r"}, ())
    assert scheduler.rows(found, 16) == 0, "vLLM computes what failed once"
    scheduler.finished(found)
    assert scheduler.step().cancelled == ()
    assert scheduler.rows(found, 0) == 40


def test_a_request_that_ends_while_it_loads_is_cancelled_once(scheduler: LoadScheduler, signer: Signer) -> None:
    found = request(signer.signed(NAME, SALT))
    scheduler.allocated(found, (1, 2, 3), 40)
    scheduler.finished(found)
    assert scheduler.step().cancelled == ("r",)
    assert scheduler.step().cancelled == ()


@pytest.mark.parametrize(("computed", "claimed"), [(0, 40), (28, 12), (30, 0), (39, 0), (40, 0)])
def test_few_rows_behind_vllms_prefix_cache_are_not_claimed(
    scheduler: LoadScheduler, signer: Signer, computed: int, claimed: int
) -> None:
    assert scheduler.rows(request(signer.signed(NAME, SALT)), computed) == claimed


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
        assert not scheduler.step().loads


def test_engines_of_one_server_know_each_others_signatures_and_none_is_without_a_secret(signer: Signer) -> None:
    """With data parallelism vLLM appends the engine's number to its id, once or twice."""
    given = signer.signed(NAME, SALT)["kvblend"]
    for number in ("_dp0", "_dp1_dp1"):
        assert Signer.of(config(f"an engine{number}")).ticket(given, SALT) == NAME
    with pytest.raises(ConfigError, match="this engine has no id"):
        Signer.of(config(""))
    without = SimpleNamespace(kv_transfer_config=None)
    assert Signer.of(without).ticket(Signer.of(without).signed(NAME, SALT)["kvblend"], SALT) is None


def test_options() -> None:
    check_options({"store": "kv", "ratio": 0.2, "learn": False})
    check_options({"store": "kv", "stage": "rows"})
    for options, why in (
        ({"store": "kv", "socket": "@x"}, "there is no option 'socket'; there are chunk_tokens, "),
        ({"store": "kv", "stage": "copied"}, "there is no stage 'copied'; leave it out"),
        ({}, "needs the option store"),
    ):
        with pytest.raises(ValueError, match=why):
            check_options(options)
    assert connector_options(config(store="kv")) == {"store": "kv"}
    assert connector_options(SimpleNamespace(kv_transfer_config=None)) == {}


def test_engines_of_a_model_with_experts_are_refused() -> None:
    model = SimpleNamespace(is_multimodal_model=False, is_moe=True)
    several = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2), model_config=model)
    with pytest.raises(ValueError, match=r"because engines of a model with experts compute in step; serve it without"):
        row_model(SimpleNamespace(config=several, layers=(), block_size=16))  # type: ignore[arg-type]


class Filling:
    """A blender that takes as many passes as a prompt has blocks, and fails for one that begins with 0 or 1."""

    unfinished = True

    def __init__(self) -> None:
        self.passed, self.rested = list[str](), list[bool]()
        self.background = self

    def __len__(self) -> int:
        return 1

    def passes(self, load: Load, figures: dict[str, Any]) -> Passes[None]:
        for _ in load.blocks:
            self.passed.append(load.request)
            yield
            if load.token_ids[0] == 0:
                raise LoadFailedError("it cannot")
            if load.token_ids[0] == 1:
                raise ColdError("nothing is stored")
        figures["rows"] = 3

    def run(self, *, alone: bool) -> None:
        self.rested.append(alone)

    def close(self) -> None:
        pass


def load(name: str, first: int, rows: int, start: int = 0) -> Load:
    return Load(name, NAME, (first,) * rows, tuple(range(3, 3 + -(-rows // 16))), start, rows - 1)


def test_each_load_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    queue = LoadQueue(Filling(), 16)  # type: ignore[arg-type]
    for one in (load("good", 9, 40), load("bad", 0, 41, 16), load("worse", 0, 42, 16), load("cold", 1, 43)):
        queue.add(one, 0.0)
    for _ in range(20):
        queue.step(0.0, alone=False)
    done = queue.done()
    assert done.failed == {"bad": {4, 5}, "worse": {4, 5}, "cold": {3, 4, 5}}
    assert done.cold == {"cold"}
    assert done.figures == {"good": {"rows": 3}}
    assert not queue.done().requests
    assert caplog.text.count("it cannot") == 1, "one line an outage"
    assert "nothing is stored" not in caplog.text


def test_the_shortest_comes_first_and_none_waits_for_ever() -> None:
    blender = Filling()
    queue = LoadQueue(blender, 16)  # type: ignore[arg-type]
    queue.add(load("long", 9, 64), 0.0)
    queue.add(load("short", 9, 16), 0.0)
    queue.step(0.0, alone=True)
    queue.step(0.1, alone=True)  # its end
    queue.add(load("shorter", 9, 15), 3.0)
    for _ in range(12):
        queue.step(3.0, alone=True)
    assert [*dict.fromkeys(blender.passed)] == ["short", "long", "shorter"]
    assert blender.rested == [True] * 5, "between loads alone"


def test_cancelled_loads_end_at_once() -> None:
    blender = Filling()
    queue = LoadQueue(blender, 16)  # type: ignore[arg-type]
    queue.add(load("running", 9, 32), 0.0)
    queue.add(load("waiting", 9, 64), 0.0)
    queue.step(0.0, alone=True)
    queue.cancel(("running", "waiting", "unknown"))
    assert queue.done().cancelled == {"running", "waiting"}
    queue.step(0.0, alone=True)
    assert blender.passed == ["running"]


@pytest.mark.parametrize(
    ("kv_heads", "size", "rank", "own"),
    [(8, 2, 0, [0, 1, 2, 3]), (8, 2, 1, [4, 5, 6, 7]), (2, 4, 1, [0]), (2, 4, 2, [1]), (1, 2, 1, [0])],
)
def test_heads_of_a_worker(kv_heads: int, size: int, rank: int, own: list[int]) -> None:
    every = torch.arange(kv_heads).view(1, -1, 1).expand(3, -1, 2)
    copies = max(1, size // kv_heads)

    def all_gather(states: torch.Tensor, dim: int) -> torch.Tensor:
        return every.repeat_interleave(copies, dim=dim)

    workers = WorkerGroup(kv_heads, SimpleNamespace(world_size=size, rank_in_group=rank, all_gather=all_gather))
    mine = workers.own_kv_heads(every)
    assert mine[0, :, 0].tolist() == own
    assert torch.equal(workers.all_kv_heads(mine), every)


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
    for version in ("0.32.0", "0.32.1+cpu", "0.33.0"):
        refuse_version(version)
    for version in ("0.31.1", "0.34.0", "0.3.2", "1.0"):
        with pytest.raises(ValueError, match=rf"^kvblend: vLLM {version} is not supported; install 0.32 or 0.33$"):
            refuse_version(version)
    checked(FullAttentionSpec())


FULL, WINDOWS = FullAttentionSpec(), "models with sliding windows or chunked attention are not supported"
REFUSED: tuple[tuple[tuple[Any, ...], dict[str, Any], str], ...] = (
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

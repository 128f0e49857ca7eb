"""Options, what the connector refuses, tickets, what the scheduler makes of them, and the order of loads."""

import logging
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from layouts import marked

from blend.errors import ConfigError, StoreError
from blend.integrations.vllm.contract import LayoutTicket, Options, Signer, refuse, refuse_version
from blend.integrations.vllm.decoder import Passes, Pause
from blend.integrations.vllm.loads import BlendedLoad, LoadQueue
from blend.integrations.vllm.prompts import CHAT, PromptForVLLM
from blend.integrations.vllm.row_model import WorkerGroup
from blend.integrations.vllm.scheduler import Load, LoadScheduler, Outcome, StepNews
from blend.integrations.vllm.shared import LoadText, SharedLoads
from blend.layout import PromptLayout
from blend.prefill.prefill import NothingStoredError
from blend.serve.flights import Flight

SALT = "salt"
LAYOUTS = {
    "chunks": PromptLayout.of_chunks((1, 2), ((3,), (4, 5), (6, 7, 8)), (9,)),
    "no chunks": PromptLayout.of_chunks((1, 2), (), (9, 10)),
    "plain, parts and a canonical prefix": marked(
        PromptLayout.of_chunks((1, 2), ((3,), (4, 5), (6, 7)), (9,), (1,)), plain={1}, parts={2: ((5, 6, 7, 8), 1)}
    ),
    "learned and new text": marked(PromptLayout.of_chunks((1, 2), ((3,), (4, 5)), (9,)), learned={0}, new={1}),
}
TICKET = LayoutTicket(PromptLayout.of_chunks((1, 2), (tuple(range(30)),), tuple(range(8))))
TEXT = TICKET.text()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_ticket_and_the_tokens_are_the_layout(name: str) -> None:
    layout = LAYOUTS[name]
    for ticket in (LayoutTicket(layout), LayoutTicket(layout, "towns", 0.05, "ada")):
        assert LayoutTicket.read(ticket.text()) == ticket


def config(engine: str = "an engine", **options: Any) -> Any:
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=engine, kv_connector_extra_config=options))


def request(transfer: Any, salt: Any = SALT) -> Any:
    ids = list(TICKET.layout.token_ids)
    return SimpleNamespace(request_id="r", kv_transfer_params=transfer, cache_salt=salt, prompt_token_ids=ids)


@pytest.fixture
def signer() -> Signer:
    return Signer(config())


@pytest.fixture
def scheduler(signer: Signer) -> LoadScheduler:
    return LoadScheduler(signer)


@pytest.mark.parametrize("asked", [{}, {"cache_salt": "\ud800"}])
def test_a_ticket_of_the_middleware_becomes_a_load(scheduler: LoadScheduler, asked: Any) -> None:
    """Whatever salt, which is mixed in, a client brings."""
    server = Signer(config())  # in another process
    body = PromptForVLLM([1], {}, TICKET, "s").put_into(asked, CHAT, server)
    blended = request(body["kv_transfer_params"], body["cache_salt"])
    assert scheduler.claimed(blended, 16) == 24, "with the last row, which vLLM computes"
    scheduler.allocated(blended, (1, 2, 3), 24)
    [load] = scheduler.step({}).loads
    assert load[:4] == ("r", TICKET, (1, 2, 3), 16)
    assert scheduler.step({}).loads == ()
    scheduler.ended({"r": Outcome({"reason": "failed"}, {"fallbacks_failed": 1})}, unfinished=True)
    assert [scheduler.step(scheduled).rests for scheduled in ({}, {"r": 1}, {"r": 1})] == [False, True, False]
    assert scheduler.claimed(blended, 16) == 0, "vLLM computes what failed once"
    assert scheduler.finished(blended) == {"reason": "failed", "rows": 40, "rows_reused": 16, "rows_computed": 24}
    assert scheduler.step({"r": 1})[1:] == ((), pytest.approx(time.monotonic(), abs=60), 4, True, False)
    assert [scheduler.step(scheduled).turn for scheduled in ({}, {"r": 1, "s": 16})] == [1, 8], "rarer among prefills"
    assert scheduler.counts == {"fallbacks_failed": 1}
    assert scheduler.claimed(blended, 0) == 40


def test_a_request_that_ends_while_it_loads_is_cancelled_once(scheduler: LoadScheduler, signer: Signer) -> None:
    blended = request(signer.signed(TEXT, SALT))
    scheduler.allocated(blended, (1, 2, 3), 40)
    scheduler.finished(blended)
    assert [scheduler.step({}).cancelled for _ in range(2)] == [("r",), ()]


@pytest.mark.parametrize(("computed", "claimed"), [(0, 40), (28, 12), (30, 0), (39, 0)])
def test_few_rows_behind_vllms_prefix_cache_are_not_claimed(
    scheduler: LoadScheduler, signer: Signer, computed: int, claimed: int
) -> None:
    assert scheduler.claimed(request(signer.signed(TEXT, SALT)), computed) == claimed


OTHER = LayoutTicket(PromptLayout.of_chunks((1, 2), ((3,),), (4,))).text()
FORGED: tuple[Any, ...] = (
    *(None, "nonsense", [1], {"kvblend": "nonsense"}, {"kvblend": {}}, {"kvblend": {"ticket": TEXT}}),
    *({"kvblend": {"ticket": 1, "signature": 1}}, {"kvblend": {"ticket": TEXT, "signature": "0" * 64}}),
    *({"kvblend": {"ticket": "\ud800", "signature": "0"}}, {"kvblend": {"ticket": TEXT, "signature": "\ud800"}}),
    *(Signer(config("other")).signed(TEXT, SALT), Signer(config()).signed(TEXT, "another salt")),
    Signer(config()).signed(OTHER, SALT),
)


@pytest.mark.parametrize("transfer", FORGED)
def test_forged_tickets_and_those_of_other_prompts_are_refused(scheduler: LoadScheduler, transfer: Any) -> None:
    assert scheduler.claimed(request(transfer), 0) == 0


@pytest.mark.parametrize("salt", [None, "", "\ud800", 7, ["salt"]])
def test_a_ticket_holds_for_its_salt_alone(scheduler: LoadScheduler, signer: Signer, salt: Any) -> None:
    """Without it blended blocks would serve other requests from the prefix cache."""
    assert scheduler.claimed(request(signer.signed(TEXT, SALT), salt), 0) == 0


def test_a_refusal_is_logged_once(scheduler: LoadScheduler, signer: Signer, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = request(signer.signed(TEXT, SALT)), request(signer.signed(TEXT, "another salt"))
    with caplog.at_level(logging.WARNING, "vllm.kvblend"):
        for asked in (bad, bad, good, bad):
            scheduler.claimed(asked, 0)
            scheduler.claimed(asked, 0)
            scheduler.finished(asked)
    assert [record.getMessage()[:32] for record in caplog.records] == ["kvblend: a ticket is refused tha"] * 2
    assert scheduler.counts == {"fallbacks_refused": 3}


def test_engines_of_one_server_know_each_others_signatures_and_none_is_without_a_secret(signer: Signer) -> None:
    """With data parallelism vLLM appends the engine's number to its id, once or twice."""
    for number in ("_dp0", "_dp1_dp1"):
        assert Signer(config(f"an engine{number}")).signed(TEXT, SALT) == signer.signed(TEXT, SALT)
    with pytest.raises(ConfigError, match="this engine has no id"):
        Signer(config(""))


def test_options_have_the_meaning_that_they_have_elsewhere() -> None:
    options = Options.of(config(store="kv", ratio=0.2, top_k=3, learn_budget=0.5))
    assert (options.store, options.blend.ratio, options.corpus.top_k) == ("kv", 0.2, 3)
    budgets = [Options.of(config(store="kv", **more)).learn_budget for more in ({}, {"learn": False})]
    assert (options.learn_budget, *budgets) == (5 * 10**8, 4 * 10**9, 0)


WRONG = {"socket": "there are chunk_tokens, ", "learn": "give true or false", "ratio": "ratio"}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options(name: str) -> None:
    with pytest.raises(ConfigError, match=WRONG[name]):
        Options.of(config(**{"store": "kv", name: 17}))
    with pytest.raises(ConfigError, match="no connector of kvblend with the option store"):
        Options.of(config(**{name: 17}))


class Blending:
    """A blender that takes as many passes as a prompt has blocks; prompts that begin with 0 or 1 fail."""

    def __init__(self) -> None:
        self.passed, self.turns = list[str](), list[int]()
        self.queue = LoadQueue(self)  # type: ignore[arg-type]
        self.decoder = SimpleNamespace(model=SimpleNamespace(block_size=16))
        self.background = SimpleNamespace(run=self.turns.append)
        self.shared = SharedLoads(cast(Any, self.decoder), None)

    def blending(self, load: Load, flight: Flight) -> Passes[Any]:
        layout = load.ticket.layout
        for _ in load.blocks:
            self.passed.append(load.request)
            yield Pause.PASS
            if layout.prefix[0] == 0:
                raise StoreError("it cannot")
            if layout.prefix[0] == 1:
                raise NothingStoredError(())
        figures = SimpleNamespace(
            **dict.fromkeys(("notes", "quality", "artifact_problems", "hits"), ()), uncorrected=False
        )
        vars(figures).update(layout=layout, problems=("damaged",), selection=SimpleNamespace(rows=torch.arange(20)))
        return BlendedLoad(cast(Any, figures), LoadText(layout))


def load(name: str, rows: int, *, first: int = 9, start: int = 0, arrived: float = 0.0) -> Load:
    ticket = LayoutTicket(PromptLayout((first,) * (rows - 1), (), (5,)))
    return Load(name, ticket, tuple(range(3, 3 + -(-rows // 16))), start, arrived)


def test_each_load_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    queue = Blending().queue
    cold = load("cold", 43, first=1)
    loads = (load("good", 40, start=16), load("bad", 41, first=0, start=16), load("worse", 42, first=0, start=16), cold)
    outcomes, failed_blocks = list[tuple[str, Outcome]](), dict[str, set[int]]()
    for number in range(20):
        queue.step(StepNews(loads if number == 0 else ()))
        outcomes += queue.outcomes.items()
        failed_blocks |= dict.fromkeys(queue.outcomes, queue.failed_blocks)
    assert [(name, outcome.figures.get("reason")) for name, outcome in outcomes] == [
        *(("good", None), ("bad", "failed"), ("worse", "failed"), ("cold", "cold"))
    ]
    good = dict(outcomes)["good"]
    assert good.figures == {"rows": 40, "rows_reused": 16, "rows_computed": 4}
    assert +Counter(good.counts) == {
        "prompts_blended": 1,
        "damaged_entries": 1,
        "rows_prompt": 40,
        "rows_recomputed": 4,
    }
    assert failed_blocks == {"bad": {4, 5}, "worse": {4, 5}, "cold": {3, 4, 5}, "good": set()}
    assert caplog.text.count("it cannot") == 1, "one line an outage"
    assert "stored" not in caplog.text


def test_the_shortest_comes_first_and_none_waits_for_ever() -> None:
    blender = Blending()
    queue = blender.queue
    queue.step(StepNews((load("long", 64), load("short", 16))))
    queue.step(StepNews(now=0.1, rests=True))
    assert blender.passed == ["short"], "another prompt gets its first token"
    queue.step(StepNews(now=0.1))  # its end
    queue.step(StepNews((load("shorter", 15, arrived=3.0),), now=3.0))
    for _ in range(11):
        queue.step(StepNews(now=3.0, turn=1, unfinished=True))
    assert [*dict.fromkeys(blender.passed)] == ["short", "long", "shorter"]
    assert blender.turns == [1] * 5, "between loads alone"


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


def test_known_versions() -> None:
    for version in ("0.32.0", "0.32.1+cpu", "0.33.0"):
        refuse_version(version)
    for version in ("0.31.1", "0.34.0", "0.3.2", "1.0"):
        with pytest.raises(ConfigError, match=rf"^kvblend: vLLM {version} is not supported; install 0.32 or 0.33$"):
            refuse_version(version)


class FullAttentionSpec(SimpleNamespace):
    """As vLLM describes a layer's cache; the class goes by its name."""


FULL, WINDOWS = FullAttentionSpec(), "models with sliding windows or chunked attention are not supported"
# With a connector vLLM has no hybrid cache manager: windows become full caches.
REFUSED: tuple[tuple[Any, dict[str, Any], str], ...] = (
    ([FullAttentionSpec(sliding_window=64)], {}, WINDOWS),
    ([FullAttentionSpec(attention_chunk_size=64)], {}, WINDOWS),
    ([SimpleNamespace()], {}, "several kinds of KV cache"),
    ([FULL, FULL], {}, "several kinds of KV cache"),
    ([FULL], {"use_mla": True}, "latent attention"),
    ([FULL], {"is_multimodal_model": True}, "read more than text"),
    ([FULL], {"is_moe": True, "data_parallel_size": 2}, "several engines of a model with experts"),
    ([FULL], {"lora_config": "adapters"}, "--enable-lora"),
    ([FULL], {"speculative_config": "drafts"}, "--speculative-config"),
    ([FULL], {"cache_dtype": "fp8"}, "--kv-cache-dtype auto"),
    ([FULL], {"pipeline_parallel_size": 2}, "use tensor or data parallelism"),
    ([FULL], {"kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
)


def checked(specs: Any, changes: dict[str, Any]) -> None:
    settings = SimpleNamespace(
        **dict.fromkeys(("use_mla", "is_multimodal_model", "is_moe"), False),
        **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size"), 1),
        cache_dtype="auto",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"store": "kv"},
        **dict.fromkeys(("lora_config", "speculative_config")),
    )
    vars(settings).update(changes)
    for name in ("model_config", "parallel_config", "cache_config", "kv_transfer_config"):
        setattr(settings, name, settings)
    refuse(settings, SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs]))


@pytest.mark.parametrize(("specs", "changes", "words"), REFUSED)
def test_what_was_never_shown_right_is_refused(specs: Any, changes: dict[str, Any], words: str) -> None:
    checked([FULL], {})
    with pytest.raises(ConfigError, match=words):
        checked(specs, changes)

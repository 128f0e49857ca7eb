"""The parts of the row stage that need no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch
from blend.integrations.vllm.rows_group import Group

from blend.integrations.vllm.contract import (
    Load,
    ModelRefusedError,
    Stages,
    Told,
    is_apart,
    name_of,
    rows_options,
    ticket_of,
    told_by,
)
from blend.integrations.vllm.decoder import Scratch, block_dimension, from_table
from blend.integrations.vllm.stage import Fingerprints
from blend.types import Part, PromptLayout

LAYOUTS = {
    "chunks": PromptLayout((1, 2), ((3,), (4, 5), (6, 7, 8)), (9,)),
    "no chunks": PromptLayout((1, 2), (), (9, 10)),
    "plain, parts and a canonical prefix": PromptLayout(
        (1, 2), ((3,), (4, 5), (6, 7)), (9,), frozenset({1}), {2: Part((5, 6, 7, 8), 1)}, (1,)
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_ticket_and_the_tokens_are_the_layout(name: str) -> None:
    layout = LAYOUTS[name]
    assert told_by(ticket_of(layout), layout.token_ids) == Told(layout)
    brought = range(len(layout.chunks))
    told = told_by(ticket_of(layout, "towns", brought), layout.token_ids)
    assert told == Told(layout, "towns", frozenset(brought))


NO_TICKETS = (
    *("", "{}", "[]", "7", '{"prefix":2,"chunks":[99]}', '{"prefix":-1,"chunks":[1]}'),
    *('{"prefix":1,"chunks":[1],"corpus":"../x"}', '{"prefix":1,"chunks":[1],"brought":[1]}', "f" * 32),
)


@pytest.mark.parametrize("ticket", NO_TICKETS)
def test_what_is_no_ticket_of_the_prompt_is_refused(ticket: str) -> None:
    with pytest.raises(ValueError, match="no prompt of these tokens"):
        told_by(ticket, (1, 2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", [1e4, 1e6])
def test_frequencies_from_cosines_and_sines(dtype: torch.dtype, base: float) -> None:
    true = 1.0 / base ** (torch.arange(0, 64, 2).float() / 64)
    angles = torch.arange(32768).float()[:, None] * true
    table = 1.3 * torch.cat((angles.cos(), angles.sin()), -1)  # a factor on both, as YaRN has it
    far = (from_table(table.to(dtype)) - true.double()).abs()
    assert float(far.max()) < (1e-8 if dtype == torch.float32 else 1e-6)


class Layer:
    def __init__(self, cache: torch.Tensor) -> None:
        self.kv_cache = cache


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3)])
def test_scratch_memory_is_laid_out_as_the_cache(order: tuple[int, ...]) -> None:
    back = sorted(range(4), key=order.__getitem__)
    shape = [(40, 2, 16, 8)[one] for one in order]
    layers = [Layer(torch.empty(shape).permute(back)) for _ in range(3)]
    own = [layer.kv_cache for layer in layers]
    with Scratch(layers, 40).bound(3):
        scratch = layers[0].kv_cache
        assert scratch.shape == (3, 2, 16, 8)
        assert all(layer.kv_cache is scratch for layer in layers)
        assert sorted(range(4), key=scratch.stride, reverse=True) == sorted(range(4), key=own[0].stride, reverse=True)
        assert not scratch.any()
    assert all(a.kv_cache is b for a, b in zip(layers, own, strict=True))


def test_the_cache_comes_back_after_an_error() -> None:
    layer = Layer(torch.empty(40, 2, 16, 8))
    own = layer.kv_cache
    with pytest.raises(RuntimeError), Scratch([layer], 40).bound(3):
        raise RuntimeError
    assert layer.kv_cache is own


def test_a_cache_whose_blocks_cannot_be_told_is_refused() -> None:
    with pytest.raises(ValueError, match="which dimension counts its 16 blocks"):
        block_dimension(torch.empty(16, 2, 16, 8), 16)


def test_what_vllm_changes_about_a_model_keeps_its_caches_apart() -> None:
    plain, quantised = Fingerprints.of("files", (None, {}, False)), Fingerprints.of("files", ("fp8", {}, False))
    scaled = Fingerprints.of("files", (None, {"rope_theta": 5e5}, False))
    assert plain.shared == "files"
    assert len({plain.shared, plain.own, quantised.shared, scaled.shared}) == 4
    assert (quantised.own, scaled.own) == (quantised.shared, scaled.shared)


class Process:
    """One of several that hold a model's heads, as vLLM's group shows it. all_of: what each gives of a layer, in turns."""

    def __init__(self, rank: int, world_size: int, all_of: Sequence[Sequence[torch.Tensor]] = ()) -> None:
        self.rank_in_group, self.world_size, self._all = rank, world_size, all_of

    def all_gather(self, states: torch.Tensor, dim: int) -> torch.Tensor:
        flat = [torch.cat([one.flatten(1) for one in mine], dim=1) for mine in self._all]
        assert torch.equal(states, flat[self.rank_in_group])
        return torch.cat(flat, dim)


@pytest.mark.parametrize(("processes", "kv_heads"), [(2, 2), (2, 8), (2, 1), (4, 2), (8, 2)])
def test_heads_go_to_the_processes_that_hold_them_and_come_back_whole(processes: int, kv_heads: int) -> None:
    """Fewer heads than processes are held several times, by processes that are neighbours."""
    whole, asked = torch.randn(5, kv_heads, 3), torch.randn(5, 8, 4)
    groups = [Group(Process(rank, processes), kv_heads) for rank in range(processes)]
    own = [group.own(whole) for group in groups]
    for rank, part in enumerate(own):
        first = rank * kv_heads // processes
        assert torch.equal(part, whole[:, first : first + max(1, kv_heads // processes)])
    queries = asked.chunk(processes, dim=1)
    for rank in range(processes):
        group = Group(Process(rank, processes, list(zip(own, queries, strict=True))), kv_heads)
        keys, found = group.gathered(own[rank], queries[rank])
        assert torch.equal(group.once(keys), whole)
        assert torch.equal(found, asked)
    assert [group.leads for group in groups] == [True, *[False] * (processes - 1)]


class Filling:
    """A stage that remembers."""

    apart, options, unfinished = False, frozenset({"store"}), True

    def __init__(self, site: Any, options: Mapping[str, Any]) -> None:
        self.filled: list[str] = []
        self.rested: list[bool] = []
        self.given = dict(options)
        MADE.append(self)

    def fill(self, load: Load) -> None:
        self.filled.append(load.ticket)

    def rest(self, *, alone: bool) -> None:
        self.rested.append(alone)

    def close(self) -> None:
        pass


class Refusing(Filling):
    def __init__(self, site: Any, options: Mapping[str, Any]) -> None:
        raise ModelRefusedError("kvblend: it cannot")


class Mistaken(Filling):
    def __init__(self, site: Any, options: Mapping[str, Any]) -> None:
        raise ValueError("kvblend: there is no such store")


class Copying(Filling):
    apart, options = True, frozenset({"socket"})


MADE: list[Filling] = []
NAME, LAYOUT = "f" * 32, '{"prefix":1}'


def site() -> Any:
    options = {"stage": "auto", "store": "s", "socket": "@s"}
    transfer = SimpleNamespace(engine_id=str(uuid4()), kv_connector_extra_config=options)
    config = SimpleNamespace(kv_transfer_config=transfer, parallel_config=SimpleNamespace(rank=0))
    return SimpleNamespace(config=config, block_size=16)


def load(ticket: str) -> Load:
    return Load(ticket[:4], ticket, tuple(range(40)), (3, 4, 5), 0, 39)


def test_each_ticket_finds_its_stage_and_the_server_learns_that_there_are_two() -> None:
    MADE.clear()
    place = site()
    options = place.config.kv_transfer_config.kv_connector_extra_config
    assert rows_options(place.config) is None, "no worker has said so"
    stages = Stages(place, options, {"copied": Copying, "rows": Filling})
    try:
        assert rows_options(place.config) == options
        assert rows_options(site().config) is None, "another engine's"
        for ticket in (NAME, LAYOUT):
            stages.start(load(ticket))
        stages.rest(alone=True)
        assert stages.unfinished
        stages.close()
        assert [one.rested for one in MADE] == [[], [True]], "what is filled beside the batch has nothing to put off"
        assert [one.filled for one in MADE] == [[NAME], [LAYOUT]]
        assert [one.given for one in MADE] == [{"socket": "@s"}, {"store": "s"}]
        assert stages.done() == ({NAME[:4]}, set(), set(), {NAME[:4]: {}, LAYOUT[:4]: {}})
    finally:
        stages.close()
    assert rows_options(place.config) is None


def test_a_model_that_is_refused_leaves_it_to_the_other_stage() -> None:
    MADE.clear()
    place = site()
    stages = Stages(
        place, place.config.kv_transfer_config.kv_connector_extra_config, {"copied": Copying, "rows": Refusing}
    )
    assert rows_options(place.config) is None
    stages.start(load(NAME))
    stages.start(load(LAYOUT))  # nobody makes one; vLLM computes its rows
    stages.close()
    assert MADE[0].filled == [NAME]
    assert stages.done() == ({NAME[:4]}, {LAYOUT[:4]}, {3, 4, 5}, {NAME[:4]: {}})
    with pytest.raises(ModelRefusedError):
        Stages(place, {}, {"rows": Refusing})
    with pytest.raises(ValueError, match="no such store"):
        Stages(place, {}, {"copied": Copying, "rows": Mistaken})


@pytest.mark.parametrize("made", [{"copied": Copying}, {"rows": Filling}, {"copied": Copying, "rows": Refusing}])
@pytest.mark.parametrize("how", ["async", "sync"])
def test_scheduler_and_workers_agree_on_what_is_filled_beside_the_batch(made: dict[str, Any], how: str) -> None:
    """The scheduler ends when it hears of a request that it does not wait for, and waits for ever for one that is not told."""
    options, place = {"load": how}, site()
    for ticket in (NAME, LAYOUT, "{}"):
        stages = Stages(place, options, made)
        stages.start(load(ticket))
        stages.close()
        done = stages.done()
        assert done.requests == ({ticket[:4]} if is_apart(made, options, ticket) else set())
        assert bool(done.failed) == (made.get(name_of(ticket)) in (None, Refusing))

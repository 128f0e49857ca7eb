"""Prompts that come together and bring the same text, in vLLM's engine: it is computed once.

`test_rows.py` runs this file in a process of its own. Real weights answer, so that a text in a wrong place is seen.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from layouts import marked
from offline import Asked, Engine, ticketed
from places import REPOSITORY
from rows_connector import is_patient

from blend.chunks.library import ChunkLibrary
from blend.errors import StoreError
from blend.integrations.vllm.contract import LayoutTicket
from blend.layout import PromptLayout, Tokens
from blend.weights import resolve_model

FILES, TOKENS, AGENTS = 3, 160, 8
ANSWER = 8  # tokens
MODEL = "smollm2-135m"
PAGES = ("serving", "selection", "study")


class Agents:
    """Prompts of agents that read the same files, in orders of their own and behind tasks of their own."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._ids = self._tokens("\n".join((REPOSITORY / "docs" / f"{page}.md").read_text() for page in PAGES))
        self._taken = 0
        self._orders = list(permutations(range(FILES)))

    def _tokens(self, text: str) -> Tokens:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def files(self) -> list[Tokens]:
        """Text that no prompt had before."""
        start = self._taken
        self._taken += FILES * TOKENS
        assert self._taken <= len(self._ids)
        return [self._ids[start + number * TOKENS : start + (number + 1) * TOKENS] for number in range(FILES)]

    def layout(self, number: int, files: Sequence[Tokens]) -> PromptLayout:
        rules = self._tokens("You are an agent. ")
        task = self._tokens(f"Task {number}: say what is said about number {number}.\n")
        chunks = [files[index] for index in self._orders[number % len(self._orders)]]
        layout = PromptLayout.of_chunks((*rules, *task), chunks, self._tokens(f"\nNow do task {number}:"), rules)
        return marked(layout, new=range(FILES))

    def layouts(self, count: int = AGENTS) -> list[PromptLayout]:
        files = self.files()
        return [self.layout(number, files) for number in range(count)]


class Rows:
    """Counts the rows of the worker's model, those that vLLM runs itself included."""

    def __init__(self, engine: Engine) -> None:
        self.count = 0
        self.at_pass: Any = lambda: None
        decoder = engine.queue.blender.decoder
        decoder.model.model.register_forward_pre_hook(self._counted, with_kwargs=True)

    def _counted(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.at_pass()
        ids = kwargs.get("input_ids", args[0] if args else None)
        self.count += int(ids.shape[0])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    options = {"store": str(tmp_path_factory.mktemp("shared") / "store"), "codec": "native", "correction": False}
    with closing(Engine(resolve_model(MODEL), options, skip_tokenizer_init=False)) as engine:
        yield engine


@pytest.fixture(scope="module")
def agents(engine: Engine) -> Agents:
    return Agents(engine.llm.get_tokenizer())


@pytest.fixture(scope="module")
def rows(engine: Engine) -> Rows:
    return Rows(engine)


def asked(layout: PromptLayout, awaited: int = 0, **ticket: Any) -> Asked:
    """awaited: how many others bring each text, as the middleware says."""
    counts = (awaited,) * len(layout.places)
    _, _, salt = ticketed(layout)
    return layout, LayoutTicket(layout, awaited=counts, **ticket).text(), salt


def figures(outputs: Sequence[Any]) -> list[dict[str, Any]]:
    return [output.kv_transfer_params["kvblend"] for output in outputs]


def answers(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def ends(engine: Engine, names: Sequence[str]) -> dict[str, Any]:
    """Run the engine; the last output of each of these requests that ends."""
    outputs = dict[str, Any]()
    while engine.llm.llm_engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.llm.llm_engine.step() if output.finished}
    return {name: outputs[name] for name in names if name in outputs}


def test_eight_prompts_compute_what_they_share_once(engine: Engine, agents: Agents, rows: Rows) -> None:
    layouts = agents.layouts()
    whole = sum(layout.rows for layout in layouts)
    before = rows.count
    outputs = engine.outputs([asked(layout) for layout in layouts], ANSWER)
    computed = rows.count - before
    shown = figures(outputs)
    assert computed < 0.55 * whole, "a file once, and 30 % of each prompt without a KV correction"
    assert sum(each["rows_ahead"] for each in shown) == FILES * TOKENS
    assert [each["rows_shared"] for each in shown] == [FILES * TOKENS] * AGENTS
    assert all("reason" not in each and each["rows_computed"] < 0.5 * each["rows"] for each in shown)
    engine.idle()
    learned = [marked(layout, learned=range(FILES)) for layout in layouts]
    again = engine.outputs([asked(layout) for layout in learned], ANSWER)
    assert answers(again) == answers(outputs), "as with text that was learned before"
    assert all("rows_shared" not in each for each in figures(again))


def test_the_first_load_computes_for_those_that_come_later(engine: Engine, agents: Agents) -> None:
    """The middleware has seen them; the engine has not."""
    first, *others = agents.layouts(3)
    [output] = engine.outputs([asked(first, awaited=2)], ANSWER)
    assert figures([output])[0]["rows_ahead"] == FILES * TOKENS
    later = figures(engine.outputs([asked(layout, awaited=2) for layout in others], ANSWER))
    assert [(each["rows_ahead"], each["rows_shared"]) for each in later] == [(0, FILES * TOKENS)] * 2


def test_alone_a_prompt_is_computed_as_ever(engine: Engine, agents: Agents) -> None:
    [output] = engine.outputs([asked(agents.layouts(1)[0])], ANSWER)
    assert figures([output])[0]["reason"] == "cold"


@pytest.mark.parametrize("names", [{"user": "ada"}, {"corpus": "towns"}])
def test_other_users_and_corpora_share_nothing(engine: Engine, agents: Agents, names: dict[str, str]) -> None:
    one, other = agents.layouts(2)
    shown = figures(engine.outputs([asked(one), asked(other, **names)], ANSWER))
    assert [each["reason"] for each in shown] == ["cold"] * 2


def test_where_the_owner_is_aborted_another_one_computes(engine: Engine, agents: Agents, rows: Rows) -> None:
    layouts = agents.layouts(4)
    begun = rows.count
    names = [engine.add(asked(layout), ANSWER) for layout in layouts]
    while rows.count < begun + TOKENS:  # the first file is computed
        engine.llm.llm_engine.step()
    engine.llm.llm_engine.abort_request(names[:1])
    outputs = ends(engine, names[1:])
    shown = figures([outputs[name] for name in names[1:]])
    assert [each["rows_shared"] for each in shown] == [FILES * TOKENS] * 3
    assert sum(each["rows_ahead"] for each in shown) in (FILES * TOKENS, (FILES - 1) * TOKENS)
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    engine.idle()
    assert scheduler.kv_cache_manager.usage == 0


def test_where_the_store_takes_nothing_each_prompt_computes_its_own(
    engine: Engine, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(library: ChunkLibrary, *cache: Any) -> None:
        raise StoreError("no space left")

    layouts = agents.layouts(2)
    monkeypatch.setattr(ChunkLibrary, "keep", full)
    outputs = engine.outputs([asked(layout) for layout in layouts], ANSWER)
    assert [each["reason"] for each in figures(outputs)] == ["cold"] * 2
    plain = engine.tokens([(layout, None, None) for layout in layouts], ANSWER)
    assert answers(outputs) == plain


def test_a_store_that_hangs_holds_nobody_back_for_long(
    engine: Engine, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not prompts that share nothing, and the others no longer than computing takes."""
    sharing, [alone] = agents.layouts(2), agents.layouts(1)
    goes_on = threading.Event()
    keep = ChunkLibrary.keep

    def put(library: ChunkLibrary, *cache: Any) -> None:
        assert goes_on.wait(60)
        keep(library, *cache)

    monkeypatch.setattr(ChunkLibrary, "keep", put)
    is_patient.clear()
    longer = replace(alone, suffix=alone.suffix * 4)  # the owner is shorter, and comes first
    names = [engine.add(asked(layout), ANSWER) for layout in (*sharing, longer)]
    ended = list[str]()
    while len(ended) < 2:
        outputs = engine.llm.llm_engine.step()
        ended += [output.request_id for output in outputs if output.finished]
    assert ended == [names[2], names[1]]
    is_patient.set()
    goes_on.set()
    assert ends(engine, names)


def test_texts_are_found_in_the_middle_of_a_longer_piece(engine: Engine, agents: Agents) -> None:
    """Prompts that came before another's pieces were known are divided in the worker."""
    whole, parts = agents.layouts(2)
    one, two, three = whole.chunks
    joined = PromptLayout.of_chunks(whole.prefix, [[*one, *two], three], whole.suffix, whole.canonical_prefix)
    shown = figures(engine.outputs([asked(marked(joined, new=range(2))), asked(parts)], ANSWER))
    assert sum(each["rows_ahead"] for each in shown) == FILES * TOKENS
    assert [each["rows_shared"] for each in shown] == [FILES * TOKENS] * 2

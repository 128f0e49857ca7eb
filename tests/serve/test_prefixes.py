"""KV of how prompts begin: what is found is right, belongs to whoever asks, and stays within its budget."""

import weakref
from typing import Any

import pytest
import torch
from cases import cache_chunks, make_layout
from dense_reference import assert_close, dense_prefill
from engines import FEW, Answer, MakeEngine, alone, ask, layouts
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import marked
from models import eager_model

from blend.config import BlendConfig
from blend.eval.estimates import FixedRatio
from blend.layout import PromptLayout
from blend.model import cpu
from blend.model.cache import BlendedCache
from blend.quality import NOTHING_ASKED, Quality
from blend.sampling import Sampling
from blend.serve.engine.prefixes import CachedPrefix, Conversation, PrefixCache
from blend.serve.engine.savings import LEAST_GAIN
from blend.serve.events import BLENDED_BEFORE, IN_MEMORY
from blend.serve.failures import STORE_UNREACHABLE
from blend.serve.prompt import Prompt
from blend.serve.request import RequestOrigin
from blend.serve.shares import ACTIVE_S
from blend.types import ChunkCache

ROW = 2 * 4 * 2  # bytes of a row of `cache_of`


def cache_of(ids: tuple[int, ...]) -> BlendedCache:
    """A cache of one layer whose rows tell all tokens up to their own, as KV does."""
    cache = BlendedCache(1, len(ids))
    told = torch.tensor([[float(i), float(sum(ids[: i + 1]))] for i in range(len(ids))])[None, None]
    cache.layers[0].write_run(0, told, told + 0.5)
    return cache


def keep(prefixes: PrefixCache, ids: tuple[int, ...], owner: str = "", session: str = "", **origin: Any) -> None:
    prefixes.keep(owner, ids, cache_of(ids), RequestOrigin(session=session, **origin))


def forget(prefixes: PrefixCache, session: str) -> int:
    return prefixes.forget("", RequestOrigin(session=session).users_session)


def check(prefixes: PrefixCache, ids: tuple[int, ...], rows: int, owner: str = "") -> None:
    """So many rows of this prompt are found, and are right."""
    found = prefixes.find(owner, ids)
    assert (found.cache.tokens if found else 0) == rows
    if found:
        assert found.exact_rows == rows
        assert torch.equal(found.cache.keys[0][0], cache_of(ids).layers[0].keys[0, 0, :rows])
        assert torch.equal(found.cache.values[0][0], cache_of(ids).layers[0].values[0, 0, :rows])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["", "a"]), st.lists(st.integers(1, 2), min_size=1, max_size=7)), max_size=12)
)
def test_the_longest_beginning_is_found(prompts: list[tuple[str, list[int]]]) -> None:
    prefixes, kept = PrefixCache(1 << 20), set()
    for owner, listed in prompts:
        ids = tuple(listed)
        common = [sum(1 for i in range(1, len(ids)) if ids[:i] == other[:i]) for whose, other in kept if whose == owner]
        check(prefixes, ids, max(common, default=0), owner)
        keep(prefixes, ids, owner)
        kept.add((owner, ids))
    rows = {(owner, ids[: i + 1]) for owner, ids in kept for i in range(len(ids))}
    assert prefixes.nbytes == ROW * len(rows)


def test_what_was_used_last_stays_within_the_budget() -> None:
    prefixes = PrefixCache(ROW * 10)
    first, second = (1, 2, 3, 4), (1, 2, 9, 9)
    for ids in (first, second, (5, 6, 7, 8)):
        keep(prefixes, ids)
    assert (prefixes.nbytes, prefixes.evictions) == (ROW * 10, 0)
    check(prefixes, (*first, 0), 4)
    keep(prefixes, (8, 8))
    assert prefixes.nbytes <= ROW * 10
    assert prefixes.evictions == 1
    check(prefixes, (*first, 0), 4)
    check(prefixes, (*second, 0), 2)  # its end went, its beginning is the first one's too


def test_a_blended_conversation_serves_only_itself() -> None:
    prefixes, ids = PrefixCache(1 << 20), tuple(range(1, 10))
    prompt, answer = ids[:6], ids[6:]

    def keep_blended(quality: Quality) -> None:
        prefixes.keep_conversation(Conversation("", prompt, answer), cache_of(ids), 3, quality)

    keep_blended(NOTHING_ASKED)
    for other in (prompt, ids[:5], (*ids[:5], 77, 5), (77, *ids)):
        assert prefixes.find("", other) is None
    assert prefixes.find("a", (*ids, 5)) is None
    # Behind the prompt it serves what repeats the answer.
    for turn, rows in (((*ids, 5), 8), ((*prompt, 7, 99, 98), 7), ((*prompt, 99), 6), (ids, 8), (ids[:8], 7)):
        found = prefixes.find("", turn)
        assert (found.cache.tokens, found.exact_rows) == (rows, 3)
        assert torch.equal(found.cache.keys[0][0], cache_of(ids).layers[0].keys[0, 0, :rows])
    keep_blended(NOTHING_ASKED)
    assert prefixes.nbytes == ROW * 8
    for asked in (None, Quality(0.05)):  # nothing was asked of its rows
        assert prefixes.find("", (*ids, 5), asked) is None
    keep_blended(Quality(0.05, 0.1))
    for asked in (Quality(0.05), Quality(0.1, 0.2)):
        assert prefixes.find("", (*ids, 5), asked) is not None
    for asked in (Quality(0.04), Quality(1, 0.05)):
        assert prefixes.find("", (*ids, 5), asked) is None
    prefixes.budget = ROW * 5
    keep(prefixes, (3,))
    assert prefixes.nbytes == ROW
    assert prefixes.find("", (*ids, 5)) is None


def test_a_recurrent_conversation_goes_on_where_its_state_is() -> None:
    prefixes, ids = PrefixCache(1 << 20), tuple(range(1, 10))
    cache = cache_of(ids)
    state = ((torch.ones(2),),)
    cache.states = lambda rows: state  # type: ignore[method-assign]
    prefixes.keep_conversation(Conversation("", ids[:6], ids[6:]), cache, 3)
    assert prefixes.find("", (*ids, 5)).cache.tokens == 8
    assert prefixes.find("", (*ids[:7], 99, 98)) is None


def test_what_is_larger_than_the_budget_pushes_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes, nothing, large = PrefixCache(ROW * 10), PrefixCache(0), tuple(range(20, 31))
    for owner in ("a", "b"):
        keep(prefixes, (1, 2, 3, 4), owner)
    monkeypatch.setattr(cpu, "copies", lambda *_: pytest.fail("what is not kept was copied"))
    for one in (prefixes, nothing):
        keep(one, large)
        one.keep_conversation(Conversation("", large, (1,)), cache_of(large), 3)
    assert (prefixes.nbytes, nothing.nbytes) == (ROW * 8, 0)
    for owner in ("a", "b"):
        check(prefixes, (1, 2, 3, 4, 5), 4, owner)


def plain(ids: tuple[int, ...], prefix: int = 4, suffix: int = 5) -> PromptLayout:
    """A prompt of ordinary text alone."""
    return marked(PromptLayout.of_chunks(ids[:prefix], (ids[prefix:-suffix],), ids[-suffix:], (1, 2, 3)), plain={0})


def turn_behind(layout: PromptLayout, begun: Answer) -> PromptLayout:
    """The next turn of this conversation."""
    answered = (*layout.suffix, *begun.tokens)
    turn = PromptLayout.of_chunks(layout.prefix, (*layout.chunks, answered), (9, 8, 7, 6, 5, 4))
    return marked(turn, plain={len(layout.chunks)})


KEPT = {"prefix_budget": 1 << 30}
WORTH_IT = {**KEPT, "least_gain": LEAST_GAIN}


def test_the_next_turn_computes_what_is_new_and_answers_as_full_prefill_does(make_engine: MakeEngine) -> None:
    engine, first = make_engine(**WORTH_IT), make_layout().token_ids
    begun = ask(engine, plain(first)).wait()
    assert begun.figures.reason == "nothing to reuse"
    ids = (*first, *begun.tokens, 9, 8, 7, 6, 5, 4)
    later = ask(engine, plain(ids)).wait()
    assert later.figures.rows_reused == len(first) + len(begun.tokens) - 1
    assert later.figures.rows_computed == len(ids) - later.figures.rows_reused
    assert later.tokens[0] == int(dense_prefill(eager_model("llama"), ids).logits[-1].argmax())
    assert ask(engine, plain(ids), tenant="other").wait().figures.rows_reused == 0
    kept = engine.prefixes.nbytes
    for layout in (plain(ids), plain(tuple(reversed(ids)))):
        assert ask(engine, layout, cold=True).wait().figures.rows_reused == 0
    assert engine.prefixes.nbytes == kept, "a cold prompt leaves nothing"


def test_what_was_found_is_let_go_once_it_is_copied(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several nodes are copies, which no budget counts."""
    engine, first = make_engine(**WORTH_IT), make_layout().token_ids
    for ids in (first, (*first, *range(3, 30))):
        ask(engine, plain(ids)).wait()
    found, find, left = list[weakref.ref[ChunkCache]](), engine.prefixes.find, list[int]()

    def finding(*asked: Any) -> CachedPrefix | None:
        result = find(*asked)
        found.extend([weakref.ref(result.cache)] if result else [])
        return result

    monkeypatch.setattr(engine.prefixes, "find", finding)
    answer = Answer(lambda: left.append(sum(one() is not None for one in found)))
    engine.submit(Prompt.of(plain((*first, *range(3, 40))), sampling=FEW), answer)
    assert answer.wait().figures.rows_reused > len(first)
    assert len(found) == 1
    assert left[1:] == [0] * FEW.max_tokens + [0]


def test_a_turn_that_asks_for_a_better_quality_is_blended_anew(make_engine: MakeEngine) -> None:
    layout, asked, better = layouts(1)[0], BlendConfig(quality=0.05), BlendConfig(quality=0.01)
    for first, second, estimated, goes_on in (
        *((better, asked, True, True), (asked, asked, False, True)),
        *((asked, better, True, False), (BlendConfig(), asked, True, False)),
    ):
        engine = make_engine(**KEPT)
        cache_chunks(engine.blender, layout)
        if estimated:
            engine.blender.estimators = FixedRatio(0.15)
        begun = ask(engine, layout, config=first).wait()
        later = ask(engine, turn_behind(layout, begun), config=second).wait().figures
        assert (later.rows_inexact > 0) == goes_on
        assert (later.quality is not None) == estimated
        assert any("no quality is promised" in note for note in later.notes) == (not estimated)
        if goes_on:
            assert later.quality == begun.figures.quality


def test_a_blended_conversation_goes_on_until_full_prefill_is_asked_for(make_engine: MakeEngine) -> None:
    engine = make_engine(**KEPT)
    layout = layouts(1)[0]
    cache_chunks(engine.blender, layout)
    begun = ask(engine, layout).wait()
    turn = turn_behind(layout, begun)
    later = ask(engine, turn).wait()
    assert later.started.hits == (True,) * len(layout.chunks)
    assert later.figures.rows_reused == layout.rows + len(begun.tokens) - 1
    assert later.figures.rows_inexact == later.figures.rows_reused - layout.chunk_spans[0].stop
    assert later.figures.reason == BLENDED_BEFORE
    cut_off = ask(engine, turn, full_because=STORE_UNREACHABLE).wait().figures
    assert cut_off.rows_inexact > 0, "without its store it goes on as it was"
    full = ask(engine, turn, Sampling(max_tokens=1, logprobs=20), method="full").wait()
    assert (full.figures.rows_reused, full.figures.rows_inexact) == (len(layout.prefix), 0)
    _is_dense(full, "llama", turn)
    again = ask(engine, turn).wait().figures
    assert (again.reason, again.rows_reused, again.rows_inexact) == (IN_MEMORY, turn.rows - 1, 0)


@pytest.mark.parametrize(("codec", "lossless"), [("native", True), ("float32", True), ("int8", False), ("int4", False)])
def test_exact_rows_serve_everybody_and_others_nobody(codec: str, lossless: bool, make_engine: MakeEngine) -> None:
    for name in ("llama", "gemma3"):
        engine = make_engine(name, codec, **KEPT)
        layout = layouts(1)[0]
        cache_chunks(engine.blender, layout)
        expected = alone(engine.blender, layout)
        assert ask(engine, layout, FEW).wait().tokens == expected
        found, rows = engine.prefixes.find("", layout.token_ids), layout.chunk_spans[0].stop
        assert found.cache.tokens == found.exact_rows == (rows if lossless else len(layout.prefix))
        dense = dense_prefill(eager_model(name), layout.token_ids)
        for index, (keys, values) in enumerate(dense.layers):
            assert_close(found.cache.keys[index], keys[0, :, : found.exact_rows])
            assert_close(found.cache.values[index], values[0, :, : found.exact_rows])
        other = PromptLayout.of_chunks(layout.prefix, (layout.chunks[0], tuple(range(20, 50))), (9, 8, 7)).all_plain()
        _is_dense(ask(engine, other, Sampling(max_tokens=1, logprobs=20), method="full").wait(), name, other)
        assert ask(engine, layout, FEW).wait().tokens == expected


def _is_dense(asked: Answer, name: str, layout: PromptLayout) -> None:
    dense = dense_prefill(eager_model(name), layout.token_ids).logits[-1].log_softmax(-1)
    ids, logprobs = zip(*(one[:2] for one in asked.first.top), strict=True)
    assert_close(torch.tensor(logprobs), dense[list(ids)])


def test_prompts_that_are_not_worth_it_are_computed_in_full(make_engine: MakeEngine) -> None:
    engine = make_engine(**WORTH_IT)
    layout = make_layout(chunks=(9, 8))
    cache_chunks(engine.blender, layout)
    short = ask(engine, layout).wait().figures
    assert (short.reason, short.rows_computed) == ("short", layout.rows - len(layout.prefix))
    chunks = tuple(tuple((7 * i + j) % 60 + 3 for j in range(90)) for i in range(3))
    long = PromptLayout.of_chunks(layout.prefix, chunks, layout.suffix)
    assert ask(engine, long).wait().figures.reason == "cold"
    cache_chunks(engine.blender, long)
    swapped = PromptLayout.of_chunks(layout.prefix, chunks[::-1], layout.suffix)
    assert ask(engine, swapped).wait().figures.reason == ""
    asked = ask(engine, swapped, Sampling(max_tokens=2), method="full").wait().figures
    assert (asked.method, asked.reason, asked.rows_computed) == ("full", "", swapped.rows - asked.rows_reused)


def test_the_rows_of_a_session_go_unless_others_begin_alike() -> None:
    prefixes = PrefixCache(1 << 20)
    mill, quay = (1, 2, 3, 4, 5, 6), (1, 2, 3, 7, 8)
    keep(prefixes, mill, session="mill")
    keep(prefixes, quay, session="quay")
    keep(prefixes, (1, 2, 9))
    keep(prefixes, mill, "other", "mill")
    prefixes.keep_conversation(
        Conversation("", (1, 5), (6, 7)), cache_of((1, 5, 6, 7)), 1, origin=RequestOrigin(session="mill")
    )
    assert forget(prefixes, "mill") == ROW * (3 + 3), "three rows of its own, and a conversation"
    check(prefixes, (1, 5, 6, 7, 8), 1)
    check(prefixes, (*mill, 0), 3)
    check(prefixes, (*quay, 0), 5)
    check(prefixes, (*mill, 0), 6, "other")
    # A session that begins in the middle of another one's rows shares no more of them than it has.
    keep(prefixes, (1, 2), session="mill")
    keep(prefixes, (1, 2, 3, 7), session="weir")
    assert forget(prefixes, "quay") == ROW, "the last one"
    check(prefixes, (*quay, 0), 4)
    assert [forget(prefixes, session) for session in ("weir", "mill", "mill")] == [2 * ROW, 0, 0]
    check(prefixes, (1, 2, 3, 0), 2)
    assert prefixes.nbytes == ROW * (3 + 6)


@pytest.mark.parametrize("flood", ["one client", "one client under many names", "an end user of the same client"])
def test_a_flood_takes_no_row_of_anothers_share(flood: str) -> None:
    prefixes = PrefixCache(40 * ROW)
    ann = {"client": "a" if flood.startswith("one") else "b", "user": "ann"}
    first, second = tuple(range(100, 110)), tuple(range(200, 210))
    keep(prefixes, first, session="mill", **ann)
    keep(prefixes, second, **ann)
    for number in range(300, 400):
        name = str(number) if flood.endswith("names") else "bob"
        keep(prefixes, (number, *range(9)), session=str(number), client="b", user=name)
    check(prefixes, (*first, 0), 10)
    check(prefixes, (*second, 0), 10)
    assert prefixes.nbytes <= prefixes.budget
    keep(prefixes, tuple(range(500, 510)), **ann)
    assert prefixes.find("", (*first, 0)) is None, "who has more than the share loses the oldest of their own"


def test_who_is_away_for_an_hour_has_no_share() -> None:
    now = [0.0]
    prefixes = PrefixCache(40 * ROW, clock=lambda: now[0])
    keep(prefixes, tuple(range(100, 110)), client="a")
    now[0] = ACTIVE_S + 1
    for number in range(300, 310):
        keep(prefixes, (number, *range(9)), client="b")
    check(prefixes, (309, *range(9), 0), 10)
    assert prefixes.find("", (*range(100, 110), 0)) is None


def test_what_an_ended_session_would_leave_is_not_kept() -> None:
    prefixes = PrefixCache(1 << 20)
    origin = RequestOrigin(session="mill", ended=lambda: True)
    ids = (1, 2, 3, 4, 5)
    prefixes.keep("", ids, cache_of(ids), origin)
    prefixes.keep_conversation(Conversation("", ids[:3], ids[3:]), cache_of(ids), 1, origin=origin)
    assert prefixes.nbytes == 0


def test_many_sessions_share_their_beginning_for_good() -> None:
    prefixes, ids = PrefixCache(1 << 20), tuple(range(1, 10))
    sessions = [f"session {number}" for number in range(40)]
    for session in sessions:
        keep(prefixes, ids, session=session)
    assert sum(forget(prefixes, session) for session in sessions) == 0
    check(prefixes, (*ids, 0), 9)

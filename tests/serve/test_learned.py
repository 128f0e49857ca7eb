"""Text that requests brought: its KV, taken out of their prompts, within a budget that outlives the process."""

import json
import sqlite3
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import monotonic
from unittest.mock import Mock

import pytest
import torch
from cases import make_layout
from layouts import marked
from models import decoder

from blend.chunks.library import ChunkLibrary
from blend.config import BlendConfig
from blend.errors import StoreError
from blend.model.decoder import full_prefill
from blend.prefill.blender import Blend, Blender
from blend.serve.learned import KEEP_S, LearnedCaches, RemovedKeys, removed_from
from blend.serve.prefixes import rows_of_prompt
from blend.store import open_store
from blend.store.admin import write_sources
from blend.store.backend import pin_cache
from blend.types import CacheKey, CacheKind, ChunkCache, ChunkKey, PlaceOrigin, PromptLayout, Tokens
from tests.store.reading import in_threads

PREFIX = make_layout().prefix
SIZE = 64  # tokens of a text


def text(number: int, size: int = SIZE) -> Tokens:
    return make_layout(chunks=(size,), seed=100 + number).chunks[0]


def prompt(*chunks: Tokens, learned: Iterable[int] | None = None) -> PromptLayout:
    places = range(len(chunks)) if learned is None else learned
    return marked(PromptLayout.of_chunks(PREFIX, chunks, make_layout().suffix), learned=places)


class Bench:
    """A store of a tiny decoder's caches and the texts learned into it."""

    def __init__(self, root: Path, budget: int = 1 << 24, codec: str = "native", **model: torch.dtype) -> None:
        self.path = root / "learned.sqlite"
        self.decoder, self.store = decoder("llama", **model), open_store(root / "kv", codec=codec)
        self.blender = Blender(self.decoder, self.store, BlendConfig("none"))
        self.learned = LearnedCaches(self.path, budget)

    @property
    def library(self) -> ChunkLibrary:
        return self.blender.library(PREFIX)

    def learn(self, layout: PromptLayout) -> None:
        """As a request does that brought them all."""
        self.learned.keep(self.library, self.brought(layout), monotonic())

    def brought(self, layout: PromptLayout) -> dict[Tokens, ChunkCache | None]:
        """The texts' KV in this prompt, computed in full."""
        cache = self.blender.prefill(layout.all_plain()).cache
        places = zip(layout.places, layout.chunk_spans, strict=True)
        return {
            place.tokens: rows_of_prompt(cache, *span) for place, span in places if place.origin is PlaceOrigin.REQUEST
        }

    def use(self, *texts: Tokens) -> None:
        """As a request does that found them."""
        self.learned.keep(self.library, dict.fromkeys(texts), monotonic())

    def hits(self, *chunks: Tokens) -> list[bool]:
        opened = self.library.open(prompt(*chunks))
        opened.close()
        return list(opened.hits)

    def found(self, ids: Tokens) -> list[tuple[int, int, int]]:
        return sorted((run.start, run.stop, run.first) for run in self.learned.index.runs(ids))


def entry_bytes(folder: Path) -> int:
    """Of one text."""
    bench = Bench(folder)
    bench.learn(prompt(text(0)))
    return bench.learned.nbytes


def close(some: torch.Tensor, others: torch.Tensor) -> None:
    torch.testing.assert_close(some, others, atol=2e-4, rtol=2e-4)


def assert_full(bench: Bench, blend: Blend, layers: Sequence[int]) -> None:
    """Keys and values of all rows of these layers are those of full prefill."""
    truth = full_prefill(bench.decoder, blend.layout).cache
    for index in layers:
        its = truth.layers[index].keys, truth.layers[index].values
        for mine, other in zip(blend.cache.view(index), its, strict=True):
            close(mine[:, :, : blend.layout.rows], other)


def test_the_same_prompt_again_gives_the_logits_of_full_prefill(tmp_path: Path) -> None:
    bench, layout = Bench(tmp_path), prompt(text(1), text(2, 90), text(3))
    bench.learn(layout)
    blend = bench.blender.prefill(layout)
    assert blend.hits == (True, True, True)
    assert len(blend.selection.rows) == len(layout.suffix)
    close(blend.logits, full_prefill(bench.decoder, layout).logits)
    assert_full(bench, blend, range(len(bench.decoder.layers)))


@pytest.mark.parametrize(("moved_from", "moved_to", "first"), [(0, 200, 0), (130, 1, 0), (63, 64, 17), (3, 300, 40)])
def test_repositioning_is_exact_where_no_context_is_read(
    tmp_path: Path, moved_from: int, moved_to: int, first: int
) -> None:
    """The first layer's keys and values depend on tokens and positions alone; also of a part of the text."""
    bench, whole = Bench(tmp_path), text(1)
    before = text(2, moved_from) if moved_from else ()
    bench.learn(marked(PromptLayout.of_chunks(PREFIX + before, (whole,), (5,), PREFIX), learned=[0]))
    layout = marked(
        PromptLayout.of_chunks(PREFIX, (text(3, moved_to), whole[first:]), (5, 6)),
        plain=[0],
        parts={1: (whole, first)} if first else {},
        learned=[1],
    )
    blend = bench.blender.prefill(layout)
    assert blend.hits[1]
    assert_full(bench, blend, [0])


@pytest.mark.parametrize("codec", ["native", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_that_count_are_those_of_the_store(tmp_path: Path, codec: str, dtype: torch.dtype) -> None:
    bench = Bench(tmp_path, codec=codec, dtype=dtype)
    bench.learn(prompt(text(1), text(2, 100)))
    stats = bench.store.stats()
    assert (stats.entries, stats.nbytes) == (2, pytest.approx(bench.learned.nbytes, rel=0.02))


def test_what_was_learned_is_found_and_opened_alone_where_it_may_be(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.learn(prompt(text(1), text(2)))
    assert bench.hits(text(2), text(3), text(1)) == [True, False, True]
    assert bench.found((9, *text(2)[5:60], 9)) == [(1, 56, 5)]
    opened = bench.library.open(prompt(text(1), learned=()))  # a chunk of a corpus has caches of its own
    opened.close()
    assert not any(opened.hits)
    key = bench.library.key(CacheKey(text(1), CacheKind.FROM_PROMPT))
    assert key in bench.learned
    assert bench.library.key(CacheKey(text(1), CacheKind.ISOLATED)) not in bench.learned


def test_a_new_process_finds_the_same_and_evicts_in_the_same_order(tmp_path: Path) -> None:
    size = entry_bytes(tmp_path / "one")
    bench = Bench(tmp_path / "own", 5 * size)
    for number in range(4):
        bench.learn(prompt(text(number)))
    bench.use(text(0))
    again = Bench(tmp_path / "own", 5 * size)
    assert (len(again.learned), again.learned.nbytes, again.learned.budget) == (4, 4 * size, 5 * size)
    asked = tuple(token for number in range(4) for token in (*text(number), 7))
    assert again.found(asked) == bench.found(asked) == [(65 * n, 65 * n + 64, 0) for n in range(4)]
    for number in range(4, 8):  # each used again at once: recurs
        again.learn(prompt(text(number)))
        again.use(text(number))
        held = again.hits(*map(text, range(8)))
        assert sum(held) <= 5
        assert held[number]
    assert again.hits(*map(text, range(8)))[:4] == [True, False, False, False], "1, 2 and 3 were used less lately"
    files = list(tmp_path.glob("own/learned*"))
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600]


def test_a_smaller_budget_holds_from_the_first_request_on(tmp_path: Path) -> None:
    size = entry_bytes(tmp_path / "one")
    bench = Bench(tmp_path / "own")
    bench.learn(prompt(*map(text, range(6))))
    small = Bench(tmp_path / "own", 3 * size)
    small.use()
    assert small.store.stats().entries == len(small.learned) == 3
    assert small.learned.nbytes <= 3 * size
    assert sum(bool(small.found(text(number))) for number in range(6)) == 3
    tiny = Bench(tmp_path / "own", size - 1)
    tiny.learn(prompt(text(7)))
    assert (tiny.store.stats().entries, len(tiny.learned), tiny.found(text(7))) == (0, 0, [])


@pytest.mark.parametrize("content", [b"", b"\xff" * 5000, "another table", "another text", "another list"])
def test_a_damaged_file_counts_as_empty(tmp_path: Path, content: bytes | str) -> None:
    Bench(tmp_path).learn(prompt(text(1)))
    path = tmp_path / "learned.sqlite"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        change = {
            "another table": "ALTER TABLE pieces RENAME TO others",
            "another text": "UPDATE pieces SET tokens = x'010203'",
            "another list": "UPDATE pieces SET caches = '[[1, 2]]'",
        }[content]
        with sqlite3.connect(path) as file:
            file.execute(change)
        file.close()
    bench = Bench(tmp_path)
    assert (len(bench.learned), bench.found(text(1))) == (0, [])
    bench.learn(prompt(text(2)))
    assert Bench(tmp_path).found(text(2)) == [(0, SIZE, 0)]


def test_the_list_of_earlier_versions_is_taken_in_and_its_caches_go_first(tmp_path: Path) -> None:
    """It names caches of texts that it does not hold, so nothing finds them any more."""
    size = entry_bytes(tmp_path / "one")
    bench = Bench(tmp_path / "own", 5 * size)
    bench.library.compute([CacheKey(text(number), CacheKind.ISOLATED) for number in range(5)])
    old = [bench.library.key(CacheKey(text(number), CacheKind.ISOLATED)) for number in range(5)]
    listed = {"version": 1, "caches": [[*key, size] for key in old], "decisions": 0}
    (tmp_path / "own" / "learned.json").write_text(json.dumps(listed))
    bench = Bench(tmp_path / "own", 5 * size)
    assert not (tmp_path / "own" / "learned.json").exists()
    assert all(key in bench.learned for key in old)
    again = Bench(tmp_path / "own", 5 * size)
    for number in range(10, 15):
        again.learn(prompt(text(number)))
    assert again.hits(*map(text, range(10, 15))) == [True] * 5
    assert not any(key in again.store for key in old)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"[" * 100_000, b'{"caches": 5}', b'{"caches": [["a", "b']
)  # fmt: skip
def test_a_damaged_list_of_earlier_versions_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "learned.json").write_bytes(content)
    bench = Bench(tmp_path)
    assert (len(bench.learned), bench.learned.nbytes) == (0, 0)
    bench.learn(prompt(text(1)))
    assert bench.hits(text(1)) == [True]


def test_a_deletion_that_fails_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    bench.learn(prompt(text(1)))
    with monkeypatch.context() as broken:
        broken.setattr(type(bench.store), "delete", Mock(side_effect=StoreError("away")))
        with pytest.raises(StoreError):
            bench.learned.forget(bench.store, [text(1)])
    bench.learned.forget(bench.store, [text(1)])
    assert bench.found(text(1)) == []
    bench.learn(prompt(text(1)))
    assert bench.hits(text(1)) == [True]


def test_caches_of_corpora_and_pinned_ones_stay(tmp_path: Path) -> None:
    size = entry_bytes(tmp_path / "one")
    bench = Bench(tmp_path / "own", 2 * size)
    bench.learn(prompt(text(1), text(2)))
    keys = [bench.library.key(CacheKey(text(number), CacheKind.FROM_PROMPT)) for number in (1, 2)]
    write_sources(bench.store, "", keys[0].namespace, {keys[0].namespace: {keys[0].digest: "a.txt"}})
    pin_cache(bench.store.backend, keys[1].digest, on=True)
    for number in range(3, 8):
        bench.learn(prompt(text(number)))
        bench.use(text(number))
    assert bench.hits(text(1), text(2)) == [True, True]
    assert sum(bench.hits(*map(text, range(3, 8)))) <= 2
    note = tmp_path / "own" / "kv" / "sources"
    (note / "_.0123456789abcdef").write_bytes(b"damaged")
    held = bench.hits(*map(text, range(10)))
    with pytest.raises(StoreError, match="nothing more is learned"):
        bench.learn(prompt(text(8), text(9), text(10)))
    assert bench.hits(*map(text, range(10))) == held
    assert bench.found(text(8)) == []


@pytest.mark.parametrize("pieces", [3, 12])
def test_of_a_text_that_is_forgotten_no_piece_stays(tmp_path: Path, pieces: int) -> None:
    bench, secret = Bench(tmp_path), text(50)
    mixed = [text(number, 40) + secret for number in range(pieces)]
    bench.learn(prompt(text(51)))
    for one in mixed:
        bench.learn(prompt(one))
    bench.learned.forget(bench.store, [secret])
    assert bench.hits(text(51), *mixed) == [True] + [False] * pieces
    assert bench.found(secret) == Bench(tmp_path).found(secret) == []
    assert len(bench.learned) == bench.store.stats().entries == 1


def test_a_list_that_cannot_be_written_says_so_in_one_line(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "file").write_text("")
    bench.learned = LearnedCaches(tmp_path / "file" / "learned.sqlite", 1 << 20)
    with pytest.raises(StoreError, match=r"\Athe list of learned texts .* cannot be used: [^\n]+\Z"):
        bench.learn(prompt(text(1)))


def test_two_threads_keep_one_budget(tmp_path: Path) -> None:
    size = entry_bytes(tmp_path / "one")
    bench = Bench(tmp_path / "own", 6 * size)

    def work(thread: int) -> None:
        first = 6 * thread  # half of what they learn is the same
        for number in range(first, first + 12):
            bench.learn(prompt(text(number), text(first)))
            bench.found(text(number) + text(first))

    in_threads(2, work)
    held = bench.hits(*map(text, range(18)))
    assert sum(held) == bench.store.stats().entries == len(bench.learned)
    assert bench.learned.nbytes == size * sum(held) <= bench.learned.budget
    assert [bool(bench.found(text(number))) for number in range(18)] == held
    assert len(Bench(tmp_path / "own", 6 * size).learned) == sum(held)


def test_what_was_removed_while_a_prompt_ran_is_learned_again_unless_it_is_old(tmp_path: Path) -> None:
    bench, layout = Bench(tmp_path), prompt(text(1))
    bench.learn(layout)
    key = bench.library.key(CacheKey(text(1), CacheKind.FROM_PROMPT))
    removed_from(bench.store).add([key])
    bench.store.delete(key)
    bench.learned.keep(bench.library, bench.brought(layout), monotonic() - 2 * KEEP_S)
    assert bench.hits(text(1)) == [False]
    bench.learned.keep(bench.library, bench.brought(layout), monotonic())
    assert bench.hits(text(1)) == [True]


def test_a_removed_cache_stays_removed_and_is_forgotten_in_time() -> None:
    now, kept = [1000.0], list[str]()
    removed = RemovedKeys(clock=lambda: now[0])
    first, *others = (ChunkKey("space", f"{number:032x}") for number in range(100))
    removed.add([first])
    began = now[0] - 1
    for other in others:
        now[0] += KEEP_S / 2
        removed.unless_removed(other, now[0], lambda: kept.append("never removed"))
        removed.add([other])
        assert len(removed) <= 4
        removed.unless_removed(other, now[0], lambda: pytest.fail("it was removed just now"))
        removed.unless_removed(first, began, lambda: pytest.fail("this prompt began before it was removed"))
    assert kept == ["never removed"] * len(others)
    removed.unless_removed(first, now[0], lambda: kept.append("brought anew"))
    assert kept[-1] == "brought anew"

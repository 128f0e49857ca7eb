"""What vLLM's own model is to compute later: in pieces, and of clients' texts only what may be stored, within a budget."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from layouts import marked

from blend.config import BlendConfig
from blend.errors import StoreError
from blend.integrations.vllm.learning import CPU_ROWS, TURN, BackgroundEncoder, learn_budget
from blend.integrations.vllm.prompts import BOOK
from blend.model.decoder import Decoder
from blend.model.passes import RowRequest
from blend.prefill.blender import Blender
from blend.serve.prompts.learned import LearnedCaches
from blend.store import ChunkStore, open_store
from blend.types import PromptLayout, Tokens
from tests.tiny_model import save_tiny_model

PREFIX, SUFFIX = (3, 4, 5), (6, 7)
SIZE = 40  # tokens of a chunk


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return Decoder.load(str(save_tiny_model(tmp_path_factory.mktemp("later") / "tiny", "some words")), device="cpu")


class Rows:
    """A decoder that notes the rows of each pass it runs for `BackgroundEncoder`."""

    model_config = SimpleNamespace(model="tiny", max_model_len=8192, get_vocab_size=lambda: 1000)
    model = SimpleNamespace(site=SimpleNamespace(layers=(), config=SimpleNamespace(model_config=model_config)))
    fingerprint, kept_as, rotations = "", "float32", ()

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self.passes = decoder, list[int]()
        self.device = decoder.device

    def run_rows(self, request: RowRequest) -> None:
        self.passes.append(request.positions.shape[0])
        self._decoder.prefill([request])


class Bench:
    """A store and its background encoder, with so many bytes for clients' texts."""

    def __init__(self, decoder: Decoder, folder: Path, budget: int) -> None:
        self.folder, self.store = folder, open_store(folder / "kv")
        self.rows, self.filler = Rows(decoder), Blender(decoder, self.store, BlendConfig())
        learned = LearnedCaches(folder / BOOK, budget) if budget else None
        self.background = BackgroundEncoder(cast(Any, self.rows), learned)
        self.library = self.filler.library(PREFIX)

    def asked(self, *chunks: Tokens, brought: tuple[int, ...] = ()) -> None:
        """A prompt of these was answered; what it missed is computed while nothing runs."""
        self.remember(*chunks, brought=brought)
        self.drain()

    def remember(self, *chunks: Tokens, brought: tuple[int, ...] = ()) -> None:
        corpus = [one for place, one in enumerate(chunks) if place not in brought]
        layout = marked(PromptLayout.of_chunks(PREFIX, chunks, SUFFIX), new=brought)
        self.background.remember(self.filler, layout, self.library.missing(corpus))

    def drain(self) -> None:
        end = time.monotonic() + 60
        while len(self.background):
            self.background.run(alone=True)
            assert time.monotonic() < end

    def held(self, *chunks: Tokens) -> list[bool]:
        return [self.library.key(one) in self.store for one in self.library.variants(chunks)]


def chunk(number: int, size: int = SIZE) -> Tokens:
    return tuple(torch.randint(10, 40, (size,), generator=torch.Generator().manual_seed(number)).tolist())


def entry_size(decoder: Decoder, folder: Path) -> int:
    bench = Bench(decoder, folder / "weighed", 10**9)
    bench.asked(chunk(0), brought=(0,))
    return bench.store.stats().nbytes


def test_with_learning_off_nothing_of_a_clients_text_is_stored(decoder: Decoder, tmp_path: Path) -> None:
    bench = Bench(decoder, tmp_path, 0)
    bench.asked(chunk(1), chunk(2), brought=(1,))
    assert bench.held(chunk(1), chunk(2)) == [True, False], "the corpus's chunk alone"
    assert not (tmp_path / BOOK).exists()


def test_an_unknown_corpus_stops_learning(decoder: Decoder, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    size = entry_size(decoder, tmp_path)
    bench = Bench(decoder, tmp_path, size)
    bench.asked(chunk(1), brought=(0,))
    note = bench.folder / "kv" / "sources"
    note.mkdir()
    (note / "_.0123456789abcdef").write_bytes(b"damaged")
    bench.asked(chunk(2), brought=(0,))
    assert bench.held(chunk(1), chunk(2)) == [True, False]
    assert "nothing more is learned" in caplog.text


def test_the_budget_holds_for_one_large_prompt_and_for_what_waits(decoder: Decoder, tmp_path: Path) -> None:
    size = entry_size(decoder, tmp_path)
    bench = Bench(decoder, tmp_path / "waiting", 2 * size)
    for number in (1, 3):
        bench.remember(chunk(number), chunk(number + 1), brought=(0, 1))
    bench.drain()
    assert bench.held(*map(chunk, range(1, 5))) == [False, False, True, True]
    large = Bench(decoder, tmp_path / "large", 2 * size)
    large.asked(*map(chunk, range(1, 6)), brought=(0, 1, 2, 3, 4))
    assert large.store.stats().entries == 2


def test_running_answers_wait_for_one_piece_now_and_then(decoder: Decoder, tmp_path: Path) -> None:
    bench = Bench(decoder, tmp_path, 10**9)
    long = chunk(1, 200)
    bench.remember(long)
    end, steps = time.monotonic() + 60, 0
    while len(bench.background):
        before = len(bench.rows.passes)
        bench.background.run(alone=False)
        steps += 1
        assert len(bench.rows.passes) - before <= (steps % TURN == 0)
        assert time.monotonic() < end
        time.sleep(0.001)
    assert bench.held(long) == [True]
    assert max(bench.rows.passes) <= CPU_ROWS
    assert sum(bench.rows.passes) == len(PREFIX) + 200


def test_while_nothing_runs_a_step_has_one_piece_and_waits_for_the_store(decoder: Decoder, tmp_path: Path) -> None:
    bench = Bench(decoder, tmp_path, 10**9)
    bench.asked(chunk(1))  # now the prefix's KV is there
    long, before = chunk(2, 200), len(bench.rows.passes)
    bench.remember(long)
    while len(bench.background):
        at = len(bench.rows.passes)
        bench.background.run(alone=True)
        assert len(bench.rows.passes) - at <= 1, "a request that comes meanwhile waits for no more"
    assert len(bench.rows.passes) - before == -(-200 // CPU_ROWS)


def test_a_pass_that_fails_is_logged_once_and_harms_no_other_cache(
    decoder: Decoder, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(decoder, tmp_path, 10**9)
    run, failing = bench.rows.run_rows, [1, 2]

    def failed(request: RowRequest) -> None:
        if failing:
            raise RuntimeError(f"no memory {failing.pop()}")
        run(request)

    monkeypatch.setattr(bench.rows, "run_rows", failed)
    bench.asked(chunk(1), chunk(2), chunk(3))
    assert bench.held(chunk(1), chunk(2), chunk(3)).count(True) == 1
    assert caplog.text.count("could not be stored") == 1


def test_a_store_that_cannot_be_written_ends_the_deferred_work(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: ChunkStore, *args: object) -> None:
        raise StoreError("the disk is full")

    bench = Bench(decoder, tmp_path, 10**9)
    monkeypatch.setattr(ChunkStore, "put", full)
    bench.asked(chunk(1), brought=(0,))
    assert "the disk is full" in caplog.text


def test_options_have_the_meaning_that_they_have_elsewhere() -> None:
    assert learn_budget({}) == 4 * 10**9
    assert learn_budget({"learn_budget": 0.5}) == 5 * 10**8
    assert learn_budget({"learn": False, "learn_budget": 0.5}) == 0
    for wrong in ({"learn": "no"}, {"learn_budget": 0}, {"learn_budget": "4 GB"}):
        with pytest.raises(ValueError, match=r"^kvblend: learn"):
            learn_budget(wrong)

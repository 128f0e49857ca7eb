"""What vLLM's own model is to compute later: in pieces, and of clients' texts only what may be stored, within a budget."""

import time
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from layouts import marked

from blend.config import BlendConfig
from blend.errors import StoreError
from blend.integrations.vllm.contract import BOOK, LayoutTicket
from blend.integrations.vllm.loads import CPU_ROWS, BackgroundEncoder
from blend.layout import PromptLayout, Tokens
from blend.model.decoder import Decoder
from blend.model.passes import RowRequest
from blend.prefill.blender import Blender
from blend.serve.prompts.learned import LearnedCaches
from blend.store import ChunkStore, open_store
from tests.tiny_model import save_tiny_model

PREFIX, SUFFIX = (3, 4, 5), (6, 7)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return Decoder.load(str(save_tiny_model(tmp_path_factory.mktemp("later") / "tiny", "some words")), device="cpu")


class Rows:
    """A decoder that notes the rows of each pass it runs for `BackgroundEncoder`."""

    is_first = True

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self.passes = decoder, list[int]()
        self.device = decoder.device

    def from_first(self, request: RowRequest | None) -> RowRequest | None:
        return request

    def run_rows(self, request: RowRequest) -> None:
        self.passes.append(request.positions.shape[0])
        self._decoder.prefill([request])


class Bench:
    """A store and its background encoder, with so many bytes for clients' texts."""

    def __init__(self, decoder: Decoder, folder: Path, budget: int = 10**9) -> None:
        self.folder, self.store = folder, open_store(folder / "kv")
        self.rows, self.blender = Rows(decoder), Blender(decoder, self.store, BlendConfig())
        learned = LearnedCaches(folder / BOOK, budget) if budget else None
        self.background = BackgroundEncoder(cast(Any, self.rows), learned)
        self.library = self.blender.library(PREFIX)

    def remember(self, *chunks: Tokens, brought: tuple[int, ...] = ()) -> None:
        """A prompt of these was answered."""
        corpus = [one for place, one in enumerate(chunks) if place not in brought]
        layout = marked(PromptLayout.of_chunks(PREFIX, chunks, SUFFIX), new=brought)
        self.background.remember(self.blender, LayoutTicket(layout), self.library.missing(corpus))

    def drain(self, turn: int = 1) -> list[int]:
        """Compute what is missing; how many pieces each step had."""
        end, pieces = time.monotonic() + 60, list[int]()
        while len(self.background):
            before = len(self.rows.passes)
            self.background.run(turn)
            pieces.append(len(self.rows.passes) - before)
            assert time.monotonic() < end
        return pieces

    def asked(self, *chunks: Tokens, brought: tuple[int, ...] = ()) -> list[bool]:
        """What it missed is computed while nothing runs; which are stored then."""
        self.remember(*chunks, brought=brought)
        self.drain()
        return self.held(*chunks)

    def held(self, *chunks: Tokens) -> list[bool]:
        return [self.library.key(one) in self.store for one in self.library.variants(chunks)]


def chunk(number: int, size: int = 40) -> Tokens:
    return tuple(torch.randint(10, 40, (size,), generator=torch.Generator().manual_seed(number)).tolist())


def test_with_learning_off_nothing_of_a_clients_text_is_stored(decoder: Decoder, tmp_path: Path) -> None:
    bench = Bench(decoder, tmp_path, 0)
    assert bench.asked(chunk(1), chunk(2), brought=(1,)) == [True, False], "the corpus's chunk alone"
    assert not (tmp_path / BOOK).exists()


@pytest.mark.parametrize("turn", [1, 4])
def test_a_step_has_one_piece_at_most_and_running_answers_wait_now_and_then(
    decoder: Decoder, tmp_path: Path, turn: int
) -> None:
    bench = Bench(decoder, tmp_path)
    bench.remember(long := chunk(1, 200))
    pieces = bench.drain(turn)
    assert max(pieces) == 1, "a request that comes meanwhile waits for no more"
    assert not any(count for number, count in enumerate(pieces, 1) if number % turn)
    assert bench.held(long) == [True]
    assert max(bench.rows.passes) <= CPU_ROWS
    assert sum(bench.rows.passes) == len(PREFIX) + 200


def test_a_pass_that_fails_is_logged_once_and_harms_no_other_cache(
    decoder: Decoder, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(decoder, tmp_path)
    run, failing = bench.rows.run_rows, [1, 2]

    def failed(request: RowRequest) -> None:
        if failing:
            raise RuntimeError(f"no memory {failing.pop()}")
        run(request)

    monkeypatch.setattr(bench.rows, "run_rows", failed)
    assert bench.asked(chunk(1), chunk(2), chunk(3)).count(True) == 1
    assert caplog.text.count("could not be stored") == 1


def test_a_store_that_cannot_be_written_ends_the_deferred_work(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ChunkStore, "put", Mock(side_effect=StoreError("the disk is full")))
    Bench(decoder, tmp_path).asked(chunk(1), brought=(0,))
    assert "the disk is full" in caplog.text

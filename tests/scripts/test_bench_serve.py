"""`scripts/bench_serve`: schedules, draws and figures against numpy, the load generator against a real socket."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import transformers

from _load import UNFINISHED, Corpus, Passage, Request, Sample, TimedQuestion, Traffic, arrivals, open_loop, zipf
from _servers import Vllm
from _serving import capacity, summary, together
from blend.config import PromptConfig
from tests.tiny_model import save_tiny_model

ROOT = Path(__file__).parents[2]
CORPUS = Corpus(tuple(Passage(f"title {i}", f"text {i}", 20 + i % 7) for i in range(30)), ("why?", "who?"))


@pytest.mark.parametrize(("rate", "seconds"), [(0.5, 400.0), (20.0, 30.0)])
def test_arrivals_are_a_poisson_process_of_the_number_that_is_expected(rate: float, seconds: float) -> None:
    times = [arrivals(rate, seconds, np.random.default_rng(seed)) for seed in range(200)]
    assert {len(one) for one in times} == {rate * seconds}
    halves = np.array([np.searchsorted(one, seconds / 2) for one in times])
    assert halves.var() == pytest.approx(rate * seconds / 4, rel=0.4), "binomial: a Poisson process of known number"
    gaps = np.concatenate([np.diff(one) for one in times])
    assert gaps.min() >= 0
    assert np.mean(gaps) == pytest.approx(1 / rate, rel=0.05)
    assert np.std(gaps) == pytest.approx(1 / rate, rel=0.05), "exponential: as wide as it is long"
    assert all(one.max() < seconds for one in times if len(one))


@pytest.mark.parametrize("exponent", [0.0, 0.9, 1.5])
def test_passages_come_as_often_as_zipf_says(exponent: float) -> None:
    traffic = Traffic(CORPUS, context_tokens=1, exponent=exponent)
    first = [CORPUS.passages.index(asked.passages[0]) for asked in traffic.at_once(4000, (3,))]
    seen = np.bincount(first, minlength=30) / len(first)
    assert np.abs(seen - zipf(30, exponent)).max() < 0.03
    assert zipf(30, exponent) == pytest.approx(
        [(i + 1) ** -exponent / sum((j + 1) ** -exponent for j in range(30)) for i in range(30)]
    )


def test_a_question_has_as_many_passages_as_fit_and_none_twice() -> None:
    for asked in Traffic(CORPUS, context_tokens=100, exponent=0.9).poisson(5, 20, (1,)):
        assert len(set(asked.passages)) == len(asked.passages)
        assert 100 - 26 < asked.context_tokens <= 100


def sample(at: float, ttft: float, tokens: int, pace: float, error: str | None = None) -> Sample:
    pieces = [at + ttft + pace * i for i in range(tokens)]
    return Sample(
        at, pieces_s=pieces, tokens=tokens, prompt_tokens=100, cached_tokens=25, done_s=pieces[-1], error=error
    )


def round_of(*samples: Sample) -> dict[str, object]:
    return {"seconds": 10.0, "samples": [sample.plain() for sample in samples]}


def test_the_row_of_a_load() -> None:
    refused = Sample(6, error="429: full")
    samples = [sample(0, 1.0, 5, 0.1), sample(2, 3.0, 5, 0.3), sample(4, 1.0, 3, 0.1, UNFINISHED), refused]
    row = summary([round_of(*samples)], 2.0)
    assert (row["requests"], row["completed"]) == (4, 2)
    assert row["completed_per_s"] == pytest.approx(0.2)
    assert row["in_time_per_s"] == pytest.approx(0.1)
    assert row["ttft_s"]["p50"] == pytest.approx(1.0)
    assert row["ttft_s"]["p95"] is None, "one was refused"
    assert row["tpot_p50_s"] == pytest.approx(0.1)
    assert row["gap_p99_s"] == pytest.approx(0.3)
    assert row["cached_share"] == pytest.approx(0.25)


def rate_row(rate: float, p95: float | None) -> dict[str, object]:
    return {"rate": rate, "ttft_s": {"p95": p95}}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(1, 1.0), (2, 2.0)], ">= 2"),
        ([(1, 1.0), (2, 16.0)], "1.5"),  # half way in the logarithm
        ([(2, 16.0), (1, 1.0)], "1.5"),
        ([(1, 1.0), (2, None)], "1"),
        ([(1, 5.0), (2, 1.0)], "none"),  # luck at a higher rate is none
        ([], "none"),
    ],
)
def test_requests_a_second_at_a_time_to_first_token(rows: list[tuple[float, float | None]], expected: str) -> None:
    assert capacity([rate_row(*row) for row in rows], 4.0) == expected


def test_rounds_are_pooled_by_their_samples() -> None:
    first = round_of(sample(0, 1.0, 2, 0.1))
    row = summary([first, round_of(sample(0, 2.0, 2, 0.1), sample(1, 3.0, 2, 0.1))], 2.0)
    assert row["requests"] == 3
    assert row["ttft_s"]["p50"] == pytest.approx(2.0)
    assert row["completed_per_s"] == pytest.approx(0.15)
    late = summary([first, round_of(sample(25, 4.0, 11, 0.1))], 2.0)
    assert late["completed_per_s"] == pytest.approx(2 / 40), "the last answer of a round may end late"


def test_tokens_per_second_count_only_while_all_run() -> None:
    early = Sample(0, pieces_s=[float(i) for i in range(31)], tokens=31)
    late = Sample(0, pieces_s=[10 + i / 2 for i in range(61)], tokens=61)  # from 10 to 40 s
    assert together([early, late])["tokens_per_s"] == pytest.approx(3.0)
    assert together([early, Sample(0, pieces_s=[29.0, 30.0, 31.0], tokens=3)])["tokens_per_s"] is None
    assert together([early, Sample(0, error="429: full")]) == {"errors": ["429: full"], "tokens_per_s": None}


@asynccontextmanager
async def listening(delay: float) -> AsyncIterator[tuple[str, list[float]]]:
    """A server that answers every request after `delay`, three pieces of text 20 ms apart; and when requests came."""
    came: list[float] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split()[0])
        asked = json.loads(await reader.readexactly(length))
        came.append(time.perf_counter())
        with suppress(TimeoutError):  # reading ends early when the client goes away
            await asyncio.wait_for(reader.read(), delay)
            writer.close()
            return await writer.wait_closed()
        if asked["refuse"]:
            body = b'{"error": {"message": "full", "type": "rate_limit_error"}}'
            writer.write(b"HTTP/1.1 429 No\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
            usage = {"completion_tokens": 3, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
            events = [{"choices": [{"delta": {"role": "assistant"}}], "kvblend": {"figures": {"method": "blend"}}}]
            events += [{"choices": [{"delta": {"content": piece}}]} for piece in "abc"]
            for event in [*events, {"choices": [], "usage": usage}]:
                writer.write(f"data: {json.dumps(event)}\n\n".encode())
                await writer.drain()
                await asyncio.sleep(0.02)
            writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()
        return await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", came


def words(asked: TimedQuestion) -> Request:
    return Request("/v1/chat/completions", {"refuse": asked.question == "refuse"})


def test_questions_are_sent_at_their_times_whatever_becomes_of_earlier_ones() -> None:
    """Ten in half a second to a server that takes 0.6 s for each."""
    plan = [TimedQuestion(0.05 * i, "refuse" if i == 9 else "why?", ()) for i in range(10)]

    async def run() -> tuple[list[Sample], list[float]]:
        async with listening(0.6) as (url, came):
            return await open_loop(url, plan, words, drain_s=20), came

    samples, came = asyncio.run(run())
    assert came[-1] - came[0] < 0.6 * 3, "not one by one"
    for one in samples[:9]:
        assert (one.error, one.text, one.tokens, one.cached_tokens) == (None, "abc", 3, 4)
        assert one.ttft_s is not None
        assert one.ttft_s >= 0.6
        assert one.tpot_s == pytest.approx(0.02, abs=0.05)
        assert one.figures == {"method": "blend"}
    assert samples[9].error == "429: full"
    assert samples[9].ttft_s is None


def test_answers_that_do_not_end_in_time_are_given_up() -> None:
    async def run() -> list[Sample]:
        async with listening(30.0) as (url, _):
            return await open_loop(url, [TimedQuestion(0.0, "why?", ())], words, drain_s=0.3)

    [one] = asyncio.run(run())
    assert (one.error, one.ttft_s) == (UNFINISHED, None)


def test_a_server_that_is_not_there_is_an_error_of_the_sample() -> None:
    [one] = asyncio.run(open_loop("http://127.0.0.1:1", [TimedQuestion(0.0, "why?", ())], words, drain_s=5))
    assert one.error is not None
    assert one.error.startswith("ConnectError")


def test_vllm_gets_the_token_ids_of_our_own_prompt(tmp_path: Path) -> None:
    text = "the harbour opens in the morning " * 40
    model = save_tiny_model(tmp_path / "tiny", text)
    server = Vllm("/nowhere/bin/python", model, threads=1, answer_tokens=5, longest=512).plain()
    passages = (Passage("Harbour", "the harbour opens", 9), Passage("", "in the morning", 7))
    request = server.words(TimedQuestion(0.0, "when?", passages))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(model))
    content = f"{PromptConfig.chat_instructions}\n\nHarbour\nthe harbour opens\n\nin the morning\n\nwhen?"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(request.body["prompt"]) == tokenizer.decode(ids)
    assert (request.body["max_tokens"], request.body["temperature"]) == (5, 0)
    assert {"--enable-prefix-caching", "float32"} <= set(server.command)
    assert "PYTHONPATH" not in server.environment

"""`scripts/bench_serve`: schedules, draws and figures against numpy, the load generator."""

import asyncio
import json
import time

import httpx
import numpy as np
import pytest
import transformers

import _load
from _load import UNFINISHED, Corpus, Passage, Request, Sample, TimedQuestion, Traffic, arrivals, open_loop, zipf
from _servers import Vllm
from _serving import capacity, stall, stalls, summary, together
from _serving_picture import write_picture
from blend.config import PromptConfig
from tests.tiny_model import save_tiny_model

CORPUS = Corpus(tuple(Passage(f"title {i}", f"text {i}", 20 + i % 7) for i in range(30)), ("why?", "who?"))


@pytest.mark.parametrize(("rate", "seconds"), [(0.5, 400.0), (20.0, 30.0)])
def test_arrivals_are_a_poisson_process_of_the_number_that_is_expected(rate, seconds):
    times = [arrivals(rate, seconds, np.random.default_rng(seed)) for seed in range(200)]
    assert {len(one) for one in times} == {rate * seconds}
    halves = np.array([np.searchsorted(one, seconds / 2) for one in times])
    assert halves.var() == pytest.approx(rate * seconds / 4, rel=0.4), "binomial: a Poisson process of known number"
    gaps = np.concatenate([np.diff(one) for one in times])
    assert np.mean(gaps) == pytest.approx(1 / rate, rel=0.05)
    assert np.std(gaps) == pytest.approx(1 / rate, rel=0.05), "exponential: as wide as it is long"


@pytest.mark.parametrize("exponent", [0.0, 0.9, 1.5])
def test_passages_come_as_often_as_zipf_says(exponent):
    traffic = Traffic(CORPUS, context_tokens=1, exponent=exponent)
    first = [CORPUS.passages.index(asked.passages[0]) for asked in traffic.at_once(4000, (3,))]
    seen = np.bincount(first, minlength=30) / len(first)
    assert np.abs(seen - zipf(30, exponent)).max() < 0.03
    assert zipf(30, exponent) == pytest.approx(
        [(i + 1) ** -exponent / sum((j + 1) ** -exponent for j in range(30)) for i in range(30)]
    )


def test_a_question_has_as_many_passages_as_fit_and_none_twice():
    for asked in Traffic(CORPUS, context_tokens=100, exponent=0.9).poisson(5, 20, (1,)):
        assert len(set(asked.passages)) == len(asked.passages)
        assert 100 - 26 < sum(passage.tokens for passage in asked.passages) <= 100


def sample(at, ttft, tokens, pace, error=None):
    pieces = [at + ttft + pace * i for i in range(tokens)]
    return Sample(
        at, pieces_s=pieces, tokens=tokens, prompt_tokens=100, cached_tokens=25, done_s=pieces[-1], error=error
    )


def round_of(*samples):
    return {"seconds": 10.0, "samples": [sample.plain() for sample in samples]}


def test_the_row_of_a_load():
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
def test_requests_a_second_at_a_time_to_first_token(rows, expected):
    assert capacity([{"rate": rate, "ttft_s": {"p95": p95}} for rate, p95 in rows], 4.0) == expected


def test_rounds_are_pooled_by_their_samples():
    first = round_of(sample(0, 1.0, 2, 0.1))
    row = summary([first, round_of(sample(0, 2.0, 2, 0.1), sample(1, 3.0, 2, 0.1))], 2.0)
    assert row["requests"] == 3
    assert row["ttft_s"]["p50"] == pytest.approx(2.0)
    assert row["completed_per_s"] == pytest.approx(0.15)
    late = summary([first, round_of(sample(25, 4.0, 11, 0.1))], 2.0)
    assert late["completed_per_s"] == pytest.approx(2 / 40), "the last answer of a round may end late"


def test_tokens_per_second_count_only_while_all_run():
    early, late, last = sample(0, 0.0, 31, 1.0), sample(0, 10.0, 61, 0.5), sample(0, 29.0, 3, 1.0)
    assert together([early, late])["tokens_per_s"] == pytest.approx(3.0), "from 10 to 30 s"
    assert together([early, last])["tokens_per_s"] is None, "two pieces are too few"
    assert together([early, Sample(0, error="429: full")]) == {"errors": ["429: full"], "tokens_per_s": None}


def pieces(*moments):
    return Sample(0.0, pieces_s=list(moments), tokens=len(moments))


def test_gaps_of_running_answers_before_and_while_others_are_prefilled():
    """Prefills last from 10 to 14 s; gaps before the second answer began are of its own prefill."""
    first = pieces(*(tenth / 10 for tenth in range(10, 50)), 5, 6, 7, 8, 9, 10, 13, 14, 20)
    second = pieces(5, 6, 7, 8, 9, 10, 12, 14, 15)
    assert stalls([first, second], [pieces(11)], 10.0, 14.0) == {
        "answers": 2, "prefills": 1, "errors": [], "before_s": 1, "median_s": 2, "longest_s": 3,
    }  # fmt: skip


def test_an_answer_that_ended_before_others_were_prefilled_leaves_no_times():
    row = stalls([pieces(1, 2, 3), pieces(1, 2, 9, 12)], [Sample(8.0, error="429: full")], 8.0, 10.0)
    assert (row["before_s"], row["median_s"], row["longest_s"], row["errors"]) == (None, None, None, ["429: full"])


def test_prompts_come_once_all_answers_run_which_are_cut_off_behind_them(monkeypatch):
    """A server whose answers have a piece each 5 ms without end; a prefill stops them all for 0.2 s."""
    free = asyncio.Event()
    free.set()

    async def endless(count):
        for _ in range(count):
            await asyncio.sleep(0.005)
            await free.wait()
            yield b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
        yield b'data: {"choices": [], "usage": {"completion_tokens": 1, "prompt_tokens": 1}}\n\n'

    async def answer(request):
        if json.loads(request.content)["max_tokens"] > 1:
            return httpx.Response(200, content=endless(100_000))
        free.clear()
        await asyncio.sleep(0.2)
        free.set()
        return httpx.Response(200, content=endless(1))

    def client_of(url):
        return httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url=url)

    monkeypatch.setattr("_serving.client_of", client_of)
    answers, prompts = ([Request("/", {"max_tokens": tokens})] * count for tokens, count in ((1000, 3), (1, 2)))
    row = asyncio.run(stall("http://127.0.0.1:1", answers, prompts, 20))
    assert (row["answers"], row["prefills"], row["errors"]) == (3, 2, [])
    assert row["before_s"] < 0.2 <= row["longest_s"]


def load_row(name, rate, p95):
    times = {"p50": 0.1, "p95": p95, "p99": p95}
    counts = {"completed_per_s": rate, "in_time_per_s": rate}
    return {"server": name, "rate": rate, "ttft_s": times, "tpot_p50_s": 0.1, "gap_p99_s": 0.2, **counts}


def test_the_picture_names_its_servers_and_is_the_same_for_the_same_rows(tmp_path):
    """Also where a first token never came, and with one rate alone."""
    rows = [load_row("blend", 2.0, 0.5), load_row("blend", 1.0, 0.2), load_row("blend --full", 1.0, None)]
    for name in ("a.svg", "b.svg"):
        write_picture(rows, [2.0, 4.0], "a model of $5 and $6", "a machine", tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert all(f"<!-- {label} -->" in text for label in ("blend", "a model of $5 and $6", "a machine"))
    assert "first token within 2 s" in text
    assert "mathdefault" not in text


def answering(monkeypatch, delay):
    """When requests come to a server that answers each after `delay`, with three pieces of text 20 ms apart."""
    came = []

    async def pieces():
        usage = {"completion_tokens": 3, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
        events = [{"choices": [{"delta": {"role": "assistant"}}], "kvblend": {"figures": {"method": "blend"}}}]
        events += [{"choices": [{"delta": {"content": piece}}]} for piece in "abc"]
        for event in [*events, {"choices": [], "usage": usage}]:
            yield f"data: {json.dumps(event)}\n\n".encode()
            await asyncio.sleep(0.02)
        yield b"data: [DONE]\n\n"

    async def answer(request):
        came.append(time.perf_counter())
        await asyncio.sleep(delay)
        if json.loads(request.content)["refuse"]:
            return httpx.Response(429, json={"error": {"message": "full", "type": "rate_limit_error"}})
        return httpx.Response(200, content=pieces())

    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(_load, "client_of", lambda url: httpx.AsyncClient(transport=transport, base_url=url))
    return came


def words(asked):
    return Request("/v1/chat/completions", {"refuse": asked.question == "refuse"})


def asked(plan, drain_s):
    return asyncio.run(open_loop("http://127.0.0.1:1", plan, words, drain_s))


def test_questions_are_sent_at_their_times_whatever_becomes_of_earlier_ones(monkeypatch):
    """Ten in half a second to a server that takes 0.6 s for each."""
    came = answering(monkeypatch, 0.6)
    samples = asked([TimedQuestion(0.05 * i, "refuse" if i == 9 else "why?", ()) for i in range(10)], 20)
    assert came[-1] - came[0] < 0.6 * 3, "not one by one"
    for one in samples[:9]:
        assert (one.error, one.text, one.tokens, one.cached_tokens) == (None, "abc", 3, 4)
        assert one.ttft_s >= 0.6
        assert one.tpot_s == pytest.approx(0.02, abs=0.05)
        assert one.figures == {"method": "blend"}
    assert samples[9].error.startswith("429: ")
    assert samples[9].ttft_s is None


def test_answers_that_do_not_end_in_time_are_given_up(monkeypatch):
    answering(monkeypatch, 30.0)
    [one] = asked([TimedQuestion(0.0, "why?", ())], 0.3)
    assert (one.error, one.ttft_s) == (UNFINISHED, None)


def test_a_server_that_is_not_there_is_an_error_of_the_sample():
    [one] = asked([TimedQuestion(0.0, "why?", ())], 5)
    assert one.error.startswith("ConnectError")


def test_vllm_gets_the_token_ids_of_our_own_prompt(tmp_path):
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

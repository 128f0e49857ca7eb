"""`scripts/bench_serve` as one command, with the servers that it starts; a second run measures only what is missing."""

import json
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from commands import main, printed

import _load
import _servers
import _serving
from _load import Corpus, Passage, Sample

NAMES, RATES = ("blend", "blend --full"), (4.0, 6.0)


def test_one_command_measures_all_servers(tmp_path):
    file = tmp_path / "r.json"
    shown = printed("bench_serve", "--json", file, "--tiny", "--picture", tmp_path / "serve.png")
    assert "requests/s with p95 TTFT <= 20 s: blend >= 6, blend --full >= 6" in shown
    held = json.loads(file.read_text())
    rows = {(row["server"], row["rate"]): row["samples"] for row in held["load"]}
    assert list(rows) == [(name, rate) for name in NAMES for rate in RATES]
    for samples in rows.values():
        assert all(one["error"] is None and one["tokens"] == 6 and one["pieces_s"] for one in samples)
    for rate in RATES:
        ours, full = rows["blend", rate], rows["blend --full", rate]
        prompts = [[one["prompt_tokens"] for one in samples] for samples in (ours, full)]
        assert prompts[0] == prompts[1], "the same prompts at the same times"
        blended = [one["figures"] for one in ours if one["figures"]["method"] == "blend"]
        assert len(blended) > len(ours) / 2, "in so short prompts a long question may leave nothing to gain"
        assert all(one["hits"] > one["chunks"] / 2 for one in blended), "the question may be learned"
        computed = [sum(one["figures"]["rows_computed"] for one in samples) for samples in (ours, full)]
        assert computed[0] < computed[1], "the latter reuses common beginnings only"
    assert held["machine"]["versions"]["kvblend"]
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")
    stalls = {row["server"]: row for row in held["stall"]}
    assert list(stalls) == list(NAMES)
    assert all((row["answers"], row["prefills"], row["errors"]) == (2, 2, []) for row in stalls.values())
    assert all(row["longest_s"] >= row["median_s"] > 0 and row["before_s"] > 0 for row in stalls.values())


class Asked(NamedTuple):
    """What a server that is not real is asked."""

    at_s: float
    body: dict[str, int]


@pytest.fixture
def started(monkeypatch):
    """Names of the servers that were started, none of which is real."""
    names = []

    @contextmanager
    def running(server, log):
        names.append(server.name)
        yield SimpleNamespace(server=server, url="", words=lambda question: Asked(question.at_s, {}))

    async def answered(url, plan, *_):
        late = 30.0 if names[-1] == "blend --full" else 1.0
        return [Sample(one.at_s, pieces_s=[one.at_s + late], tokens=1, done_s=one.at_s + late) for one in plan]

    async def stall(url, answers, prompts, drain_s):
        times = {"before_s": 0.1, "median_s": 0.2, "longest_s": 0.3}
        return {"answers": len(answers), "prefills": len(prompts), "errors": [], **times}

    corpus = Corpus(tuple(Passage(f"title {number}", "text", 48) for number in range(9)), ("why?",))
    monkeypatch.setattr(_load, "tiny_model", lambda folder: folder)
    monkeypatch.setattr(_load, "make_corpus", lambda *_, **__: corpus)
    monkeypatch.setattr(_servers, "running", running)
    for name in ("open_loop", "one_by_one"):
        monkeypatch.setattr(_load, name, answered)
    monkeypatch.setattr(_serving, "stall", stall)
    return names


def test_what_is_there_is_not_measured_again_nor_mixed_with_other_options(started, tmp_path, capsys):
    """A server that is too late at a rate gets no higher one."""
    file = tmp_path / "r.json"
    given = ("bench_serve", "--json", file, "--tiny")
    for servers in (["--servers", "blend"], [], []):
        capsys.readouterr()
        assert main(*given, *servers) == 0
    assert started == list(NAMES)
    shown, before = capsys.readouterr().out, file.read_bytes()
    assert "requests/s with p95 TTFT <= 20 s: blend >= 6, blend --full none" in shown
    rows = json.loads(before)["load"]
    assert [(row["server"], row["rate"]) for row in rows] == [(name, rate) for name in NAMES for rate in RATES]
    assert [row.get("why_not") for row in rows] == [None, None, None, "too late at 4/s already"]
    assert main("bench_serve", "--json", file, "--show") == 0
    assert capsys.readouterr().out == shown
    with pytest.raises(SystemExit, match="was measured with other options: name another file"):
        main(*given, "--dtype", "bfloat16")
    assert file.read_bytes() == before

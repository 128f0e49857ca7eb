"""`blend verify`: a correct model passes, broken ones fail, and the verdict is remembered."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import cache_chunks, make_layout
from click.testing import CliRunner, Result
from models import FAMILIES, decoder

import blend.cli.verify
from blend.cli.verify import command
from blend.config import BlendConfig
from blend.errors import QualityError, UndecidedError
from blend.eval.report import Measurement, summarise
from blend.eval.verify import (
    CHUNKS,
    RATIOS,
    RECURRENT_WAYS,
    ModelCheck,
    Verdict,
    Way,
    builtin_records,
    check_model,
    remember,
)
from blend.files import read_values
from blend.prefill.blender import Blender
from blend.rag import Rag
from blend.store import open_store
from blend.verified import checked_states, first_warning, may_blend
from tests.tiny_model import BAMBA, save_tiny_model

TEXT = "the harbour has nine gates and the market has two bells " * 50


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of verdicts."""
    monkeypatch.setenv("KVBLEND_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "verified.json"


def blender_of(name: str, folder: Path) -> Blender:
    return Blender(decoder(name), open_store(folder / "kv", codec="native"), BlendConfig())


def failed(blender: Blender) -> list[str]:
    """Names of the checks that failed."""
    layout = make_layout()
    cache_chunks(blender, layout)
    checks = check_model(blender, layout)
    assert len(checks) == 4
    return [check.name for check in checks if not check.passed]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_passes_the_checks(name, tmp_path):
    assert failed(blender_of(name, tmp_path)) == []


def test_keys_that_are_moved_wrongly_fail(tmp_path, monkeypatch):
    blender = blender_of("llama", tmp_path)
    still = tuple(layer._replace(keys=None) for layer in blender.decoder.rotations)
    monkeypatch.setattr(blender.decoder, "rotations", still)
    assert any("moved keys" in name for name in failed(blender))


def test_rows_that_change_fail(tmp_path, monkeypatch):
    blender = blender_of("llama", tmp_path)
    prefill = blender.prefill

    def disturbed(layout, *, config=None, room=256, watch=None):  # type: ignore[no-untyped-def]
        blend = prefill(layout, config=config, room=room, watch=watch)
        if config is not None and config.ratio == 0.05:
            kept = torch.ones(layout.rows, dtype=torch.bool)
            kept[blend.selection.rows] = False
            blend.cache.view(1)[0][0, 0, int(kept.nonzero()[-1])] += 1
        return blend

    monkeypatch.setattr(blender, "prefill", disturbed)
    assert any("not recomputed" in name for name in failed(blender))


def measured(kl: dict[Way, list[float]], answers: dict[Way, str] | None = None) -> Verdict:
    """By way, the KL of every question and the answer to all, which is "yes" unless told otherwise."""
    rows = []
    for number in range(len(next(iter(kl.values())))):
        full = Measurement("full", str(number), "yes", 2.0, {}, 100, 100.0, f1=1.0, kl=0.0, right=True)
        rows.append(full)
        for way, values in kl.items():
            answer = (answers or {}).get(way, "yes")
            right = answer != "no"
            rows.append(replace(full, method=way.name, kl=values[number], ttft_s=1.0, answer=answer, right=right))
    return Verdict((ModelCheck("a", 0.0, 1.0),), summarise(rows), 0.05)


def alike(kl: float) -> Verdict:
    return measured({Way(ratio): [kl] * 16 for ratio in RATIOS})


def test_the_smallest_ratio_that_keeps_the_quality():
    pairs = {0.0: [0.2, 0.3], 0.02: [0.1, 0.08], 0.05: [0.09, 0.005], 0.15: [0.01, 0.02], 0.30: [0.0, 0.0]}
    verdict = measured({Way(ratio): pair * 8 for ratio, pair in pairs.items()}, {Way(0.02): "sure", Way(0.15): "no"})
    # At 5 % the mean is below the limit, its interval is not.
    assert (verdict.best, verdict.decision) == (Way(0.15), "kept")
    two, five = (next(line for line in verdict.lines if line.startswith(start)) for start in ("  2%", "  5%"))
    changed = "answers changed: 100% [81%, 100%]; of these"
    assert two.endswith(f"{changed} 16 equal in meaning, 0 better, 0 worse, 0 wrong in both")
    assert five.endswith("answers changed: 0% [0%, 19%]")
    assert "--ratio 0.15 keeps" in verdict.lines[-1]
    assert verdict.lines[-1].endswith(f"{changed} 0 equal in meaning, 0 better, 16 worse, 0 wrong in both")
    assert verdict.document["report"]["methods"]["15%"]["changes"]["worse"] == 16
    strict = replace(verdict, quality=1e-9)
    assert strict.best == Way(0.30)
    broken = replace(verdict, checks=(ModelCheck("a", float("nan"), 1.0),))
    assert broken.decision == "broken"
    assert "failed" in broken.lines[-1]
    json.dumps(verdict.document, allow_nan=False)


def test_an_interval_around_the_limit_decides_nothing():
    verdict = measured({Way(ratio): [0.0, 0.11] * 10 for ratio in RATIOS})
    assert verdict.decision == "undecided"
    assert int(verdict.lines[-1].split()[-1]) > 100


def test_it_is_remembered():
    llama = decoder("llama")
    assert "has not been checked" in first_warning(llama)
    assert first_warning(llama) == ""  # once on a machine
    remember(llama, alike(0.0))
    assert first_warning(llama) == ""
    assert "has not been checked" in first_warning(decoder("mistral"))
    remember(llama, alike(0.5))
    assert "failed" in first_warning(llama)


@pytest.mark.parametrize(
    ("composed", "last", "states"), [(0.02, 0.01, "last-chunk"), (0.01, 0.02, "composed"), (0.5, 0.02, "last-chunk")]
)
def test_the_best_states_are_remembered(composed, last, states):
    bamba = decoder("bamba")
    assert checked_states(bamba) == "composed"
    kl = {Way(0.15): composed, Way(0.15, "last-chunk"): last, Way(0.3): 0.001, Way(0.3, "last-chunk"): 0.001}
    verdict = measured({way: [mean] * 16 for way, mean in kl.items()})
    assert verdict.best == Way(0.15, states)
    assert ("states from the last chunk alone" in verdict.lines[-1]) == (states == "last-chunk")
    remember(bamba, verdict)
    assert may_blend(bamba)
    assert checked_states(bamba) == states


def test_a_model_whose_every_way_is_too_far_gets_full_prefill():
    verdict = measured({way: [0.5] * 16 for way in RECURRENT_WAYS})
    remember(decoder("bamba"), verdict)
    assert verdict.decision == "broken"
    assert not may_blend(decoder("bamba"))


@pytest.fixture
def verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Result, Any]]:
    """Runs `blend verify` over sixteen questions; gives what it returned, and the verdict it wrote."""
    chunks = [{"title": f"Town {i}", "text": f"Town {i} has {i + 3} gates and {i} bells. " * 4} for i in range(5)]
    asked = {"question": "How many gates has town 2?", "answers": ["5"], "chunks": chunks}
    questions, out = tmp_path / "q.jsonl", tmp_path / "v.json"
    questions.write_text("\n".join(json.dumps({**asked, "id": str(number)}) for number in range(16)))
    monkeypatch.setattr(blend.cli.verify, "REPORT_TOKENS", 8)  # of an answer: shorter ones are measured sooner

    def verify(model: Path, *options: str) -> tuple[Result, Any]:
        common = ["--questions", str(questions), "--dtype", "float32", "--json", str(out)]
        return CliRunner().invoke(command, [str(model), *common, *options]), json.loads(out.read_text())

    return verify


def test_the_command(verify, memory, tmp_path):
    model = save_tiny_model(tmp_path / "tiny", TEXT)
    done, verdict = verify(model, "--quality", "50")
    assert done.exit_code == 0, done.output
    assert "PASSED: --ratio 0 " in done.output
    assert verdict["passed"] is True
    done, _ = verify(model, "--quality", "0.000001")
    assert isinstance(done.exception, QualityError)
    assert "no ratio" in str(done.exception)
    done, _ = verify(model, "--quality", "50", "--limit", "2")
    assert isinstance(done.exception, UndecidedError)
    assert "2 questions cannot show" in str(done.exception)
    assert read_values(memory, dict)


def test_the_command_compares_the_states_of_recurrent_layers(verify, memory, tmp_path):
    done, verdict = verify(save_tiny_model(tmp_path / "tiny", TEXT, family="Bamba", **BAMBA), "--quality", "50")
    assert done.exit_code == 0, done.output
    methods = verdict["report"]["methods"]
    assert list(methods) == ["full", "15%", "15% last-chunk", "30%", "30% last-chunk"]
    assert methods["15%"]["kl"] != methods["15% last-chunk"]["kl"]
    best = min(("15%", "15% last-chunk"), key=lambda name: methods[name]["kl"])
    assert verdict["states"] == (best.removeprefix("15%").strip() or "composed")
    (kept,) = read_values(memory, dict).values()
    assert (kept["decision"], kept["ratio"], kept["states"]) == ("kept", 0.15, verdict["states"])


def test_builtin_questions(tmp_path):
    model = save_tiny_model(tmp_path / "tiny", TEXT)
    found = builtin_records(Rag(tmp_path / "store", model=str(model), device="cpu").template, 5)
    assert [len(record.chunks) for record in found] == [CHUNKS] * 5

"""`blend verify`: a correct model passes, broken ones fail, and the verdict is remembered."""

import json
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase

import pytest
import torch
from cases import cache_chunks, make_layout
from click.testing import CliRunner
from models import FAMILIES, decoder

from blend.cli.verify import command
from blend.config import BlendConfig
from blend.errors import QualityError, UndecidedError
from blend.eval import verify
from blend.eval.report import Measurement, summarise
from blend.eval.verify import RATIOS, ModelCheck, Verdict, check_model, remember
from blend.files import read_values
from blend.model.cache import Rotation
from blend.prefill.blender import Blender
from blend.rag import Rag
from blend.store import open_store
from blend.verified import first_warning
from tests.tiny_model import save_tiny_model


def blender_of(name: str, folder: Path) -> Blender:
    return Blender(decoder(name), open_store(folder / "kv", codec="native"), BlendConfig())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_passes_the_checks(name: str, tmp_path: Path) -> None:
    blender, layout = blender_of(name, tmp_path), make_layout()
    cache_chunks(blender, layout)
    checks = check_model(blender, layout)
    assert [check.name for check in checks if not check.passed] == []
    assert len(checks) == 4


def failed(blender: Blender) -> list[str]:
    layout = make_layout()
    cache_chunks(blender, layout)
    return [check.name for check in check_model(blender, layout) if not check.passed]


def test_keys_that_are_moved_wrongly_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blender = blender_of("llama", tmp_path)

    monkeypatch.setattr(Rotation, "turn", None)
    assert any("moved keys" in name for name in failed(blender))


def test_rows_that_change_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def measured(kl: dict[float, list[float]], answers: dict[float, str]) -> Verdict:
    rows = []
    for number in range(len(kl[0.0])):
        one = Measurement("full", str(number), "yes", 2.0, {}, 100, 100.0, f1=1.0)
        rows.append(one)
        for ratio in RATIOS:
            other = replace(
                one, method=f"{ratio:.0%}", kl=kl[ratio][number], ttft_s=1.0, answer=answers.get(ratio, "yes")
            )
            rows.append(other)
    return Verdict((ModelCheck("a", 0.0, 1.0),), summarise(rows), 0.05)


def test_the_smallest_ratio_that_keeps_the_quality() -> None:
    pairs = {0.0: [0.2, 0.3], 0.02: [0.1, 0.08], 0.05: [0.09, 0.005], 0.15: [0.01, 0.02], 0.30: [0.0, 0.0]}
    verdict = measured({ratio: pair * 8 for ratio, pair in pairs.items()}, {0.02: "no", 0.15: "no"})
    # At 5 % the mean is below the limit, its interval is not.
    assert (verdict.ratio, verdict.decision, verdict.passed) == (0.15, "kept", True)
    assert verdict.flips(0.02).mean == 1.0
    assert verdict.flips(0.05).mean == 0.0
    assert "--ratio 0.15" in verdict.lines[-1]
    assert verdict.lines[-1].endswith("100% [81%, 100%] of the answers differ from full recompute's")
    strict = replace(verdict, quality=1e-9)
    assert strict.ratio == 0.30
    broken = replace(verdict, checks=(ModelCheck("a", float("nan"), 1.0),))
    assert not broken.passed
    assert "failed" in broken.lines[-1]
    json.dumps(verdict.document, default=str)


def test_no_ratio_keeps_the_quality() -> None:
    verdict = measured({ratio: [0.5, 0.4] * 8 for ratio in RATIOS}, {})
    assert (verdict.ratio, verdict.decision, verdict.passed) == (None, "broken", False)
    assert "no ratio up to 30%" in verdict.lines[-1]


@pytest.mark.parametrize("kl", [[0.0, 0.0], [0.5, 0.4]])
def test_two_questions_decide_nothing(kl: list[float]) -> None:
    verdict = measured(dict.fromkeys(RATIOS, kl), {})
    assert (verdict.ratio, verdict.decision, verdict.passed) == (None, "undecided", False)
    assert verdict.lines[-1].startswith("undecided: 2 questions cannot show")
    assert verdict.lines[-1].endswith("take --limit 16")


def test_an_interval_around_the_limit_decides_nothing() -> None:
    verdict = measured({ratio: [0.0, 0.11] * 10 for ratio in RATIOS}, {})
    assert verdict.decision == "undecided"
    assert int(verdict.lines[-1].split()[-1]) > 100


def test_it_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBLEND_CACHE", str(tmp_path))
    dec, other = decoder("llama"), decoder("mistral")
    assert "has not been verified" in first_warning(dec)
    assert first_warning(dec) == ""  # once on a machine
    remember(dec, measured({ratio: [0.0] * 16 for ratio in RATIOS}, {}))
    assert first_warning(dec) == ""
    assert "has not been verified" in first_warning(other)
    remember(dec, measured({ratio: [0.5] * 16 for ratio in RATIOS}, {}))
    assert "failed" in first_warning(dec)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "tiny", "the harbour has nine gates and the market has two bells " * 50)


def test_the_command(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBLEND_CACHE", str(tmp_path / "cache"))
    chunks = [{"title": f"Town {i}", "text": f"Town {i} has {i + 3} gates and {i} bells. " * 4} for i in range(5)]
    asked = {"question": "How many gates has town 2?", "answers": ["5"], "chunks": chunks}
    questions = tmp_path / "q.jsonl"
    questions.write_text(
        "\n".join(json.dumps({**asked, "id": name}) for name in ascii_lowercase[:16]), encoding="utf-8"
    )
    out = tmp_path / "v.json"

    def run(*more: str):  # type: ignore[no-untyped-def]
        given = [str(tiny), "--questions", str(questions), "--dtype", "float32", "--json", str(out), *more]
        return CliRunner().invoke(command, given)

    done = run("--quality", "50")
    assert done.exit_code == 0, done.output
    assert "PASSED: --ratio 0 " in done.output
    assert json.loads(out.read_text())["passed"] is True
    done = run("--quality", "0.000001")
    assert isinstance(done.exception, QualityError)
    assert "no ratio" in str(done.exception)
    done = run("--quality", "50", "--limit", "2")
    assert isinstance(done.exception, UndecidedError)
    assert "2 questions cannot show" in str(done.exception)
    assert read_values(tmp_path / "cache" / "verified.json", dict)


def test_builtin_questions(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny", "the harbour has nine gates " * 50)
    found = verify.builtin_records(Rag(tmp_path / "store", model=str(model), device="cpu").template, 5)
    assert len(found) == 5
    assert all(len(record.chunks) == verify.CHUNKS for record in found)

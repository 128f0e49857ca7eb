"""`scripts/bench_arena` in a small package that follows KVShareArena's contract, with a tiny model."""

import io
import json
import sys
from contextlib import redirect_stdout

import pytest
import torch
from commands import main
from transformers import AutoModelForCausalLM, AutoTokenizer

from blend.errors import ConfigError, DatasetError
from tests.tiny_model import save_tiny_model

SYSTEM, BEFORE, BETWEEN, AFTER = "You answer.", "Passages:\n", "\n\nQuestion: ", "\nAnswer:"
ANSWER_TOKENS = 6
PACKAGE = {
    "__init__": "",
    "contract": """
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
METHODS = {}
@dataclass
class AnswerResult:
    text: str
    recomputed_layer_tokens: int = 0
    dense_payload_layer_tokens: int = 0
    kv_bytes: int = 0
    ttft_ms: float | None = None
    aux: dict = field(default_factory=dict)
class BaseRepairMethod(ABC):
    @abstractmethod
    def setup(self, model_id, config): ...
    @abstractmethod
    def build_cache(self, source_text): ...
    @abstractmethod
    def answer(self, question, caches, config): ...
def register(name):
    def registered(method):
        if name in METHODS:
            raise ValueError(name)
        METHODS[name] = method
        method.name = name
        return method
    return registered
""",
    "data": """
import json, os
FROZEN_N = 100
def load_queryset(subset, data_dir=None, n=FROZEN_N, strict_manifest=True):
    path = f"{data_dir}/{subset}_n100.jsonl"
    if os.path.exists(f"{data_dir}/damaged"):
        raise RuntimeError("queryset manifest mismatch")
    with open(path) as file:
        records = [json.loads(line) for line in file]
    return records[:n], {"file": path, "sha256": str(os.path.getsize(path)), "manifest_checked": False}
def load_anchors(model_slug="qwen3-8b", explicit=None, data_dir=None):
    path = f"{data_dir}/anchors_{model_slug}.json"
    with open(path) as file:
        return json.load(file), path
""",
    "harness": f"""
import json
from .contract import METHODS
from .data import load_queryset
EXAM = {{"track": "re", "subset": "hotpotqa", "prompt_key": "P_c", "system_prompt": {SYSTEM!r}, "pre_ctx": {BEFORE!r},
         "mid_q": {BETWEEN!r}, "tail": {AFTER!r}, "max_new_tokens": {ANSWER_TOKENS}}}
def run(method_name, model_id, track, subset, n=100, data_dir=None, out=None, method_cfg=None, prompt_key="P_c", log=print):
    config = {{"exam": EXAM, **(method_cfg or {{}})}}
    method = METHODS[method_name]()
    assert track in set(method.track) and 0 <= method.mechanism_class <= 9
    method.setup(model_id, config)
    results = []
    for record in load_queryset(subset, data_dir, n)[0]:
        caches = [method.build_cache(chunk) for chunk in record["chunks"]]
        answer = method.answer(record["input"], caches, config)
        row = {{"_id": record["_id"], "golds": record["answers"], "pred": answer.text, "f1_raw": 0.0}}
        results.append({{**row, **vars(answer)}})
    method.teardown()
    summary = {{"method": method_name, "n": len(results), "calibration": config["calibration"]}}
    card = {{name: getattr(method, name) for name in ("name", "provenance", "backend", "training_data", "cost_notes")}}
    with open(out, "w") as file:
        json.dump({{"summary": summary, "results": results, "method_card": card}}, file)
""",
    "schema": """
def validate(doc, frozen_ids=None, expect_n=100):
    problems = [] if len(doc["results"]) == doc["summary"]["n"] == expect_n else ["another number of results"]
    if doc["method_card"]["provenance"] not in ("official", "port", "reference"):
        problems.append("provenance")
    counts = ("recomputed_layer_tokens", "dense_payload_layer_tokens", "kv_bytes")
    return problems + [name for row in doc["results"] for name in counts if not row[name] >= 0]
""",
    "scoring": """
def rescore_items(doc):
    return {row["_id"]: float(row["pred"].strip() in row["golds"]) for row in doc["results"]}
def average(scores):
    return sum(scores.values()) / len(scores)
def score_doc(doc, anchors, track, subset, baseline="naive_pos", recompute=True):
    scored = anchors["tracks"][track][subset]
    items = rescore_items(doc)
    floor, gap = average(scored["floor"]), average(scored["oracle"]) - average(scored["floor"])
    same = sorted(set(items) & set(scored[baseline]))
    difference = sum(items[name] - scored[baseline][name] for name in same) / len(same)
    paired = {"mean_diff": difference, "ci95": [difference, difference]}
    pgr = (average(items) - floor) / gap if gap > 1e-3 else None
    return {"f1_mean": average(items), "pgr": pgr, f"vs_{baseline}": paired}
""",
}
RECORDS = [
    {
        "_id": str(number),
        "input": f" How many gates has town {number}?\n",
        "answers": ["none"],
        "chunks": [f"Town {number} and part {part}.\n" + f"It has {part} bells and gates. " * 12 for part in range(4)],
    }
    for number in range(3)
]
SCORES = {"floor": (0, 0, 1), "oracle": (1, 1, 0), "naive_pos": (1, 0.5, 0)}  # the third question is not asked
METHODS = ("no_context", "full_prefill", "plain_reuse", "published_15", "5", "15")


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone of an arena whose first subset has three records, and a tiny model."""
    clone = tmp_path_factory.mktemp("arena")
    (clone / "kvsharearena").mkdir()
    for name, text in PACKAGE.items():
        (clone / "kvsharearena" / f"{name}.py").write_text(text)
    data = clone / "data" / "queryset"
    data.mkdir(parents=True)
    (data / "hotpotqa_n100.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
    scored = {role: {str(number): score for number, score in enumerate(scores)} for role, scores in SCORES.items()}
    first = {role: {"0": scores["0"]} for role, scores in scored.items()}
    tiny = str(clone / "tiny")
    for name, model, scores in (("theirs", tiny, scored), ("few", tiny, first), ("large", "large", scored)):
        anchors = {"model": model, "tracks": {"re": {"hotpotqa": scores}}}
        (data / f"anchors_{name}.json").write_text(json.dumps(anchors))
    save_tiny_model(clone / "tiny", RECORDS[0]["chunks"][0], initializer_range=0.4)
    return clone


@pytest.fixture(autouse=True)
def path(monkeypatch):
    """The arena is off the path after each test."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def bench(*options):
    """The command's status. It imports the arena anew, as a process of its own would: a name is registered once."""
    for name in [name for name in sys.modules if name.split(".")[0] == "kvsharearena"]:
        del sys.modules[name]
    return main("bench_arena", *options)


def table(*options):
    """What the command prints; it must succeed."""
    with redirect_stdout(io.StringIO()) as out:
        assert bench(*options) == 0
    return out.getvalue()


def options(clone, *more):
    common = ("--arena", clone, "--out", clone / "runs", "--model", clone / "tiny", "--dtype", "float32")
    return (*common, "--threads", 1, "--records", 2, *more)


def full_answer(clone, record):
    """The answer of the model's own `generate` to the arena's prompt: its pieces are tokenised one by one."""
    tokenizer = AutoTokenizer.from_pretrained(clone / "tiny")
    model = AutoModelForCausalLM.from_pretrained(clone / "tiny", dtype=torch.float32)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": BEFORE + "\0"}]
    before, after = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).split("\0")
    question = BETWEEN + record["input"] + AFTER + after
    pieces = [before, *record["chunks"], question]
    ids = torch.tensor([[token for piece in pieces for token in tokenizer(piece, add_special_tokens=False).input_ids]])
    mask = torch.ones_like(ids)  # the tiny tokenizer pads with a token that prompts have
    out = model.generate(ids, attention_mask=mask, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :]), ids.shape[1]


def test_every_method_runs_in_the_arena_on_its_prompt(clone):
    shown = table(*options(clone))
    files = {name: next((clone / "runs").glob(f"*-kvblend_{name}.json")) for name in METHODS}
    documents = {name: json.loads(file.read_text()) for name, file in files.items()}
    rows = {name: document["results"] for name, document in documents.items()}
    for record, row in zip(RECORDS, rows["full_prefill"], strict=False):
        assert (row["pred"], row["aux"]["prompt_tokens"]) == full_answer(clone, record)
    assert set(documents["15"]["summary"]["calibration"]) == set(RECORDS[2]["chunks"]), (
        "no source that a question is asked over"
    )
    for alone, full, reuse, published, few, many in zip(*rows.values(), strict=True):
        dense = full["dense_payload_layer_tokens"]
        assert alone["dense_payload_layer_tokens"] == 0
        assert {row["dense_payload_layer_tokens"] for row in (reuse, published, few, many)} == {dense}
        assert reuse["recomputed_layer_tokens"] == 0
        assert few["recomputed_layer_tokens"] == pytest.approx(0.05 * dense, rel=0.1)
        assert many["recomputed_layer_tokens"] == pytest.approx(0.15 * dense, rel=0.1)
        assert published["recomputed_layer_tokens"] > 0.3 * dense, "its first layer runs on all rows"
        assert full["kv_bytes"] == reuse["kv_bytes"] == many["kv_bytes"] > 0
        assert many["aux"]["question_layer_tokens"] > published["aux"]["question_layer_tokens"] == 0
        assert min(row["ttft_ms"] for row in (alone, full, reuse, published, few, many)) > 0
    assert shown.count("\n| kvblend_") == len(METHODS)
    times = {file: file.stat().st_mtime_ns for file in files.values()}
    assert table(*options(clone)) == shown
    assert {file: file.stat().st_mtime_ns for file in files.values()} == times, "no method ran again"
    theirs = table(*options(clone, "--show", "--anchors", "theirs"))
    assert "PGR from the arena's theirs" in theirs
    assert "| kvblend_5 | 0.000 | 0.00 | -0.750 [-0.75, -0.75] |" in theirs, (
        "anchors of the two questions that are asked"
    )
    for name, why in (("others", "has no anchors"), ("few", "lack '1'"), ("large", "are of large")):
        with pytest.raises(ConfigError, match=f"{why}.*; leave --anchors out"):
            bench(*options(clone, "--show", "--anchors", name))


def test_results_of_other_questions_are_not_taken_for_these(clone, tmp_path):
    few = ("--only", "kvblend_no_context", "--out", tmp_path)
    table(*options(clone, *few))
    (tmp_path / "hotpotqa_n100.jsonl").write_text("\n".join(map(json.dumps, RECORDS[::-1][:2])))
    with pytest.raises(SystemExit, match="measured with other options"):
        bench(*options(clone, *few, "--data", tmp_path))
    with pytest.raises(ConfigError, match="gives 3 questions, not 50: change --records"):
        bench(*options(clone, *few, "--records", 50))


def test_a_folder_that_is_no_clone_is_refused(clone, tmp_path):
    with pytest.raises(ConfigError, match="name a clone of"):
        bench("--arena", tmp_path, "--out", tmp_path)
    with pytest.raises(DatasetError, match="lacks a question set"):
        bench(*options(clone, "--data", tmp_path))
    (tmp_path / "damaged").touch()
    with pytest.raises(DatasetError, match="mismatch: fetch the question sets again"):
        bench(*options(clone, "--data", tmp_path))


def test_another_contract_is_refused(clone, tmp_path):
    (tmp_path / "kvsharearena").mkdir()
    for name, text in PACKAGE.items():
        changed = text.replace("BaseRepairMethod", "BaseMethod")
        (tmp_path / "kvsharearena" / f"{name}.py").write_text(changed)
    with pytest.raises(ConfigError, match="another contract"):
        bench("--arena", tmp_path, "--out", tmp_path)

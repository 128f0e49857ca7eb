"""`scripts/bench_arena` in a small package that follows KVShareArena's contract, with a tiny model."""

import json
import sys

import pytest
import torch
from commands import main, printed
from transformers import AutoModelForCausalLM, AutoTokenizer

from blend.errors import ConfigError, DatasetError
from tests.tiny_model import save_tiny_model

SYSTEM, BEFORE, BETWEEN, AFTER = "You answer.", "Passages:\n", "\n\nQuestion: ", "\nAnswer:"
ANSWER_TOKENS = 6
PACKAGE = {
    "__init__": "",
    "contract": """
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
class BaseRepairMethod: ...
def register(name):
    return lambda method: METHODS.setdefault(name, method)
""",
    "data": """
import json, os
FROZEN_N = 100
def load_queryset(subset, data_dir, n):
    path = f"{data_dir}/{subset}_n100.jsonl"
    if os.path.exists(f"{data_dir}/damaged"):
        raise RuntimeError("queryset manifest mismatch")
    with open(path) as file:
        return [json.loads(line) for line in file][:n], {"file": path, "sha256": str(os.path.getsize(path))}
def load_anchors(slug, data_dir):
    if slug != "theirs":
        raise FileNotFoundError(slug)
    return {"tracks": {"re": {"hotpotqa": {"floor": {"0": 0.25}, "oracle": {"0": 0.5}}}}}, "anchors.json"
""",
    "harness": f"""
import json
from .contract import METHODS
from .data import load_queryset
EXAM = {{"system_prompt": {SYSTEM!r}, "pre_ctx": {BEFORE!r}, "mid_q": {BETWEEN!r}, "tail": {AFTER!r},
         "max_new_tokens": {ANSWER_TOKENS}}}
def run(name, model, track, subset, n, data_dir, out, method_cfg, log):
    config = {{"exam": EXAM, **method_cfg}}
    method = METHODS[name]()
    method.setup(model, config)
    results = []
    for record in load_queryset(subset, data_dir, n)[0]:
        caches = [method.build_cache(chunk) for chunk in record["chunks"]]
        answer = method.answer(record["input"], caches, config)
        results.append({{"_id": record["_id"], "golds": record["answers"], "pred": answer.text, **vars(answer)}})
    method.teardown()
    with open(out, "w") as file:
        json.dump({{"results": results, "calibration": method_cfg["calibration"]}}, file)
""",
    "schema": """
def validate(document, expect_n):
    return [] if len(document["results"]) == expect_n else ["another number of results"]
""",
    "scoring": """
def rescore_items(document):
    return {row["_id"]: float(row["pred"].strip() in row["golds"]) for row in document["results"]}
def score_doc(document, anchors, track, subset):
    scored = anchors["tracks"][track][subset]
    mean = {name: sum(items.values()) / len(items) for name, items in scored.items()}
    f1 = sum(rescore_items(document).values()) / len(document["results"])
    gap = mean["oracle"] - mean["floor"]
    return {"f1_mean": f1, "pgr": (f1 - mean["floor"]) / gap if gap > 0 else None}
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
    save_tiny_model(clone / "tiny", RECORDS[0]["chunks"][0], initializer_range=0.4)
    return clone


@pytest.fixture(autouse=True)
def unimported(monkeypatch):
    """The arena's modules are gone after each test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "kvsharearena"]:
        del sys.modules[name]


def options(clone, *more):
    common = ("--arena", clone, "--out", clone / "runs", "--model", clone / "tiny", "--dtype", "float32")
    return ("bench_arena", *common, "--threads", 1, "--records", 2, *more)


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
    table = printed(*options(clone))
    files = {name: next((clone / "runs").glob(f"*-kvblend_{name}.json")) for name in METHODS}
    documents = {name: json.loads(file.read_text()) for name, file in files.items()}
    rows = {name: document["results"] for name, document in documents.items()}
    for record, row in zip(RECORDS, rows["full_prefill"], strict=False):
        assert (row["pred"], row["aux"]["prompt_tokens"]) == full_answer(clone, record)
    assert set(documents["15"]["calibration"]) == set(RECORDS[2]["chunks"]), "no source that a question is asked over"
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
    assert table.count("\n| kvblend_") == len(METHODS)
    times = {file: file.stat().st_mtime_ns for file in files.values()}
    assert printed(*options(clone)) == table
    assert {file: file.stat().st_mtime_ns for file in files.values()} == times, "no method ran again"
    assert "PGR from the arena's theirs" in printed(*options(clone, "--show", "--anchors", "theirs"))
    with pytest.raises(ConfigError, match="leave --anchors out"):
        main(*options(clone, "--show", "--anchors", "others"))


def test_results_of_other_questions_are_not_taken_for_these(clone, tmp_path):
    few = ("--only", "kvblend_no_context", "--out", tmp_path)
    printed(*options(clone, *few))
    (tmp_path / "hotpotqa_n100.jsonl").write_text("\n".join(map(json.dumps, RECORDS[::-1][:2])))
    with pytest.raises(SystemExit, match="measured with other options"):
        main(*options(clone, *few, "--data", tmp_path))
    with pytest.raises(ConfigError, match="gives 3 questions, not 50: change --records"):
        main(*options(clone, *few, "--records", 50))


def test_a_folder_that_is_no_clone_is_refused(clone, tmp_path):
    with pytest.raises(ConfigError, match="name a clone of"):
        main("bench_arena", "--arena", tmp_path, "--out", tmp_path)
    with pytest.raises(DatasetError, match="lacks a question set"):
        main(*options(clone, "--data", tmp_path))
    (tmp_path / "damaged").touch()
    with pytest.raises(DatasetError, match="mismatch: fetch the question sets again"):
        main(*options(clone, "--data", tmp_path))


def test_another_contract_is_refused(clone, tmp_path):
    (tmp_path / "kvsharearena").mkdir()
    for name, text in PACKAGE.items():
        changed = text.replace("BaseRepairMethod", "BaseMethod")
        (tmp_path / "kvsharearena" / f"{name}.py").write_text(changed)
    with pytest.raises(ConfigError, match="another contract"):
        main("bench_arena", "--arena", tmp_path, "--out", tmp_path)

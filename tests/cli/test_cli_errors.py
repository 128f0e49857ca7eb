"""Mistakes: one line that names the remedy, the exit code of its kind, nothing on stdout, and before anything is loaded."""

import os
import re

import pytest
from blend_process import one_line

from blend.cli import exit_code_of
from tests.tiny_model import save_tiny_model

ODD = os.fsdecode(b"caf\xe9 \xff")

# arguments, what the line says, and the exit code where it is not 2
MISTAKES: list[tuple[object, ...]] = [
    (("anser", "x"), "did you mean 'answer'?"),
    (("frobnicate",), "choose one of analyze, answer, "),
    (("--frob",), "No such option"),
    (("answer",), "Missing argument 'QUESTION'"),
    (("answer", "x", "--ratoi", "1"), "--ratio"),
    (("answer", "x", "--check-layer", "2"), "No such option '--check-layer'"),
    (("answer", "x", "--selector", "best"), "unknown selector 'best'; choose one of hkvd, "),
    (("answer", "x", "--selector", "hkvd:check_layer=0"), "from 1 to 9,999"),
    (("answer", "x", "--selector", "hkvd:rows=2"), "hkvd has no parameter 'rows'; choose among check_layer, of, "),
    (("answer", "x", "--selector", "all:k=3"), "all takes no parameters"),
    (
        ("answer", "x", "--selector", "mixed:lead=nan"),
        "mixed: lead: 'nan' is not a whole number from 0 to 1,000,000",
    ),
    (("answer", "x", "--selector", f"first_k:k={2**63}"), "is not a whole number from 1 to 1,000,000"),
    (("report", "--selector", "query_guided:layers=lower"), "all, middle, upper"),
    (("report", "--selector", "query_guided:layers=9-4"), "layers such as 4-9"),
    (("analyze", "x", "--selector", "query_guided:layers=3,7"), "layers are joined by +"),
    (("analyze", "x", "--selector", "mixed:of=x"), "choose one of v, k, kv"),
    (("answer", "x", "--device", "cuda:١"), "is none of auto, cpu, cuda or cuda:N"),
    (("answer", "x", "--device", "abacus"), "auto, cpu, cuda or cuda:N"),
    (("answer", "x", "--mask", "upper-left"), "'exact', 'bottom-right'"),
    (("answer", "x", "--codec", "int3"), "'bfloat16', "),
    (("answer", "x", "--dtype", "int8"), "'float32', "),
    (("answer", "x", "--ratio", "1.5"), "'--ratio': 1.5 is not a number from 0 to 1"),
    (("answer", "x", "--ratio", "nan"), "is not a number from 0 to 1"),
    (("answer", "x", "--store-budget", "1e300"), "1e+300 is not a number from 0.000001 to 1,000,000"),
    (("answer", "x", "--store", "s3:/bucket/name"), "s3:/... is no address of a store: write s3://..."),
    (("answer", "x", "--store", "~no-such-user/store"), "no such user"),
    (("answer", "x", "--corpus", "../x"), "cannot name a corpus"),
    (("answer", ODD), "Invalid value for 'QUESTION': 'caf\\udce9 \\udcff' is not UTF-8 text"),
    (("analyze", ODD, "--json", "out.json"), "Invalid value for '[QUESTION]'"),
    (("answer", "x", "--model", ODD), "Invalid value for '--model'"),
    (("answer", "x", "--selector", ODD), "is not UTF-8 text"),
    (("precompute",), "Missing argument 'PATHS...'"),
    (("precompute", ".", "--chunk-tokens", "3"), "3 is not a whole number from 16 to 1,000,000"),
    (("precompute", ".", "--shard=0/2"), "such as 2/4"),
    (("precompute", ".", "--shard", "1/2", "--quick"), "leave one of them out"),
    (("precompute", ".", "--shard", "1/2", "--ray"), "leave one of them out"),
    (("precompute", ".", "--quick", "--ray"), "leave one of them out"),
    (("precompute", ".", "--ray-workers", "2"), "give both"),
    (("report", "--dataset", "nowhere.jsonl"), "cannot be read", 6),
    (("serve", "--host", "0.0.0.0"), "give keys with --api-key or --api-keys, or insist with --no-api-key"),
    (("serve", "--api-key", "x", "--no-api-key"), "exclude each other"),
    (("serve", "--api-key", "two words"), "printable ASCII characters without spaces"),
    (("serve", "--api-keys", "nowhere"), "nowhere cannot be read"),
    (("serve", "--host", "nowhere.invalid", "--no-api-key"), "nowhere.invalid is no address of this machine"),
    (("serve", "--allow-origin", "*"), "'--allow-origin': '*' is no origin"),
    (("serve", "--store", "/dev/null"), "choose another one with --store", 7),
    (("store", "--store", "s4://bucket/x"), "no address of a store"),
    (("store", "--store", "redis://host/x"), "a number, that of the database"),
    (("store", "--store", "plain", "--store-cache", "x"), "for a store at an address"),
    (("store", "--store", "plain", "ls"), "behind the command"),
    (("store", "ls", "--store", "s3://bucket/x", "--store-hot", "s3://b"), "no address of a store"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: ascii(" ".join(mistake[0]))[:70])
def test_a_mistake_ends_in_one_line(blend, mistake):
    arguments, told, code = (*mistake, 2)[:3]
    result = blend.here(*arguments)
    assert (result.code, result.out) == (code, "")
    assert result.err.count("\n") == 1
    assert told in one_line(result.err)
    assert not blend.store.exists()


@pytest.mark.parametrize("question", ["", " \n\t"])
def test_an_empty_question(filled, question):
    for call in ({"arguments": question, "stdin": ""}, {"arguments": "-", "stdin": question}):
        result = filled("answer", call["arguments"], stdin=call["stdin"])
        assert (result.code, result.out, result.err) == (3, "", "blend: the question is empty; ask something\n")


def test_models_that_are_not_there(filled, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for model, code, told in (
        ("./nowhere", 5, "no model directory"),
        ("./file", 5, "no model directory"),
        ("./folder", 2, "no config.json"),
        ("nobody/nothing", 2, "HF_HUB_OFFLINE"),
        ("smollm", 2, "did you mean 'smollm2-135m'?"),
        ("not a / valid // id", 2, "blend models"),
    ):
        result = filled("answer", "x", "--model", model)
        assert told in result.refused(code)
        assert "Loading" not in result.err
    result = filled("answer", "x", "--embedder", "nobody/nothing")
    assert "use `minilm`" in result.refused(8)
    assert "Loading" not in result.err


def test_what_shows_when_the_model_is_loaded(filled, model, texts, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text((model / "config.json").read_text())
    shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
    save_tiny_model(tmp_path / "gpt2", "\n".join(texts.values()), family="GPT2", **shape)
    for arguments, code, told in (
        (("answer", "x", "--model", "./broken"), 2, "holds no causal language model"),
        (("answer", "x", "--model", "./gpt2"), 4, "use full prefill for this model"),
        (("precompute", ".", "--model", "./gpt2"), 4, "use full prefill for this model"),
        (("answer", "x", "--selector", "hkvd:check_layer=9"), 2, "layers 0 to 3"),
        (("answer", "x", "--device", "cuda"), 2, "use --device cpu"),
    ):
        assert told in filled(*arguments, env={"CUDA_VISIBLE_DEVICES": ""}).refused(code)


def test_nothing_to_read(blend, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary.md").write_bytes(bytes(range(256)))
    (tmp_path / "blank.md").write_text(" \n")
    for path, told in (
        ("nowhere", "no such file or folder: nowhere"),
        ("empty", "give files or a folder of .md"),
        ("binary.md", "is a binary file"),
        ("blank.md", "is empty"),
    ):
        result = blend.here("precompute", path)
        assert told in result.refused(8)
        assert "Loading" not in result.err
    assert not blend.store.exists()


def test_a_bug_shows_its_traceback_and_where_to_report_it(capsys):
    assert exit_code_of(lambda: 1 / 0) == 1
    shown = capsys.readouterr().err
    assert "ZeroDivisionError" in shown
    assert re.search(r"^blend: this is a bug .*`blend env`", shown.splitlines()[-1])


def test_a_full_disk_is_one_line(capsys):
    def write() -> None:
        raise OSError(28, "No space left on device", "corpus/csv.md")

    assert exit_code_of(write) == 1
    assert capsys.readouterr().err == "blend: No space left on device: corpus/csv.md\n"

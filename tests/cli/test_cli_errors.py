"""Mistakes: one line that names the remedy, the exit code of its kind, nothing on stdout, and before anything is loaded."""

import os

import pytest

from blend.cli import exit_code_of

ODD = os.fsdecode(b"caf\xe9 \xff")

# arguments, what the line says, and the exit code where it is not 2
MISTAKES: list[tuple[object, ...]] = [
    (("anser", "x"), "did you mean 'answer'?"),
    (("frobnicate",), "choose one of analyze, answer, "),
    (("answer",), "Missing argument 'QUESTION'"),
    (("answer", "x", "--ratoi", "1"), "--ratio"),
    (("answer", "x", "--selector", "best"), "unknown selector 'best'; choose one of hkvd, "),
    (("answer", "x", "--selector", "mixed:lead=nan"), "mixed: lead: 'nan' is not a whole number from 0 to 1,000,000"),
    (("answer", "x", "--device", "cuda:١"), "is none of auto, cpu, cuda or cuda:N"),
    (("answer", "x", "--codec", "int3"), "'bfloat16', "),
    (("answer", "x", "--ratio", "1.5"), "'--ratio': 1.5 is not a number from 0 to 1"),
    (("answer", "x", "--store", "~no-such-user/store"), "no such user"),
    (("answer", "x", "--corpus", "../x"), "cannot name a corpus"),
    (("answer", ODD), "Invalid value for 'QUESTION': 'caf\\udce9 \\udcff' is not UTF-8 text"),
    (("analyze", ODD, "--json", "out.json"), "Invalid value for '[QUESTION]'"),
    (("answer", "x"), "run `blend precompute`", 8),
    (("analyze", "x", "--json", "one", "--html", "one"), "name the same file"),
    (("precompute",), "Missing argument 'PATHS...'"),
    (("precompute", "nowhere"), "no such file or folder: nowhere", 8),
    (("precompute", "."), "give files or a folder of .md", 8),
    (("precompute", ".", "--surrogate-text", "/dev/null"), "is empty"),
    (("precompute", ".", "--surrogate-text", "."), "cannot be read"),
    (("precompute", ".", "--chunk-tokens", "3"), "3 is not a whole number from 16 to 1,000,000"),
    (("precompute", ".", "--shard=0/2"), "such as 2/4"),
    (("precompute", ".", "--shard", "1/2", "--quick"), "leave one of them out"),
    (("precompute", ".", "--shard", "1/2", "--ray"), "leave one of them out"),
    (("precompute", ".", "--ray-workers", "2"), "give both"),
    (("report", "--dataset", "nowhere.jsonl"), "cannot be read", 6),
    (("report", "--dataset", "nowhere.jsonl", "--questions", "auto"), "give one of them"),
    (("report", "--questions", "/dev/null"), "no question", 6),
    (("serve", "--host", "0.0.0.0"), "give keys with --api-key or --api-keys, or insist with --no-api-key"),
    (("serve", "--api-key", "x", "--no-api-key"), "exclude each other"),
    (("serve", "--api-key", "two words"), "printable ASCII characters without spaces"),
    (("serve", "--api-keys", "nowhere"), "nowhere cannot be read"),
    (("serve", "--host", "nowhere.invalid", "--no-api-key"), "nowhere.invalid is no address of this machine"),
    (("serve", "--allow-origin", "*"), "'--allow-origin': '*' is no origin"),
    (("serve", "--store", "/dev/null"), "choose another one with --store", 7),
    (("store", "--store", "s4://bucket/x"), "no address of a store"),
    (("store", "--store", "plain", "--store-cache", "x"), "for a store at an address"),
    (("store", "--store", "plain", "ls"), "behind the command"),
    (("store", "ls", "--store", "s3://bucket/x", "--store-hot", "s3://b"), "no address of a store"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: ascii(" ".join(mistake[0]))[:70])
def test_a_mistake_ends_in_one_line(blend, mistake):
    arguments, told, code = (*mistake, 2)[:3]
    result = blend.here(*arguments)
    assert told in result.refused(code)
    assert result.err.count("\n") == 1
    assert not blend.store.exists()


@pytest.mark.parametrize(("question", "stdin"), [("", ""), ("-", " \n\t")], ids=["argument", "standard input"])
def test_an_empty_question(filled, question, stdin):
    result = filled("answer", question, stdin=stdin)
    assert (result.code, result.out, result.err) == (3, "", "blend: the question is empty; ask something\n")


@pytest.mark.parametrize(
    ("option", "name", "code", "told"),
    [
        ("--model", "./nowhere", 5, "no model directory"),
        ("--model", ".", 2, "no config.json"),
        ("--model", "nobody/nothing", 2, "HF_HUB_OFFLINE"),
        ("--model", "smollm", 2, "did you mean 'smollm2-135m'?"),
        ("--model", "not a / valid // id", 2, "blend models"),
        ("--embedder", "nobody/nothing", 8, "use `minilm`"),
    ],
)
def test_a_model_that_is_not_there(filled, option, name, code, told):
    result = filled("answer", "x", option, name)
    assert told in result.refused(code)
    assert "Loading" not in result.err


def test_a_full_disk_is_one_line(capsys):
    def write() -> None:
        raise OSError(28, "No space left on device", "corpus/csv.md")

    assert exit_code_of(write) == 1
    assert capsys.readouterr().err == "blend: No space left on device: corpus/csv.md\n"

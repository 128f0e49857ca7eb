r"""Titles, file names, ids, names and answers that a terminal would obey are shown and not obeyed, by every command."""

import ast
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from blend_process import Blend, Request, Result, one_line
from places import REPOSITORY

from blend.cli import console, exit_code_of
from tests import towns

# Window title, clear screen, a hyperlink, C1 controls, a bidirectional override, a forged line, a line taken back, markup.
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b]8;;http://x.example\x1b\\\x9b31m\x85\u202eevil\u2066\u2028\x7f\b"
MARKUP = "[bold]loud[/bold][link=http://x.example]here[/link]"
HOSTILE = f"{ESCAPES}\nblend: forged line\rover{MARKUP}"
FILE_NAME = HOSTILE.replace("/", "")
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
TINY = ("--max-new-tokens", "3")
WRITING = (".echo", "print", ".write")


def _harmless(result: Result, code: int = 0) -> str:
    """What was shown, with no byte in it that a terminal would obey, and no line that was forged."""
    shown = result.out + result.err
    assert result.code == code, result.err
    assert not OBEYED.search(shown), repr(shown)
    assert not any(line.startswith("blend: forged") for line in shown.splitlines())
    assert "Traceback" not in shown
    return shown


@pytest.fixture(scope="module")
def hostile_model(save_model: Callable[..., Path]) -> Path:
    """A model in a folder with such a name, whose answers are control characters: only their tokens have a logit."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plain = save_model("plain")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(plain), AutoTokenizer.from_pretrained(plain)
    controls = [tokenizer.encode(chr(code), add_special_tokens=False)[0] for code in (*range(1, 32), 127)]
    others = torch.ones(model.lm_head.weight.shape[0], dtype=torch.bool)
    others[controls] = False
    with torch.no_grad():
        model.lm_head.weight[others] = 0
    model.save_pretrained(plain)
    return plain.rename(plain.with_name(FILE_NAME))


@pytest.fixture(scope="module")
def hostile(process: Request, hostile_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Blend:
    """A command line with that model, a store with such a name, and documents with such names and titles."""
    folder, texts = tmp_path_factory.mktemp("hostile"), towns.documents()
    (folder / f"{FILE_NAME}.md").write_text(texts["harbour.md"].replace("# The harbour", f"# The {MARKUP}{ESCAPES}"))
    (folder / f"{FILE_NAME}.txt").write_text(texts["market.md"].removeprefix("# The market"))
    (folder / f"binary {FILE_NAME}.md").write_bytes(bytes(range(256)))
    (folder / os.fsdecode(b"not utf-8 \xff\xfe.md")).write_text(texts["quarry.md"])
    made = Blend(process, tmp_path_factory.mktemp("calls"), hostile_model, folder / f"store {FILE_NAME}")
    shown = _harmless(made("precompute", folder, "--chunk-tokens", "64"))
    assert "skipped" in shown
    assert r"\x1b]0;owned\x07\x1b[2J" in shown
    return made


def test_answers_titles_and_names(hostile):
    result = hostile("answer", "When did it open?", "--compare", "--max-new-tokens", "12", "--top-k", "12")
    shown = _harmless(result)
    answer, _, panel = result.out.partition("╭")
    assert re.search(r"\\x[01][0-9a-f]|\\x7f|\\r", answer), answer
    assert "x1b" not in panel  # titles lose control characters when documents are read
    assert "[bold]loud[/bold]" in re.sub(r"[│\s]", "", panel)
    assert "Loading" in shown
    _harmless(hostile("answer", "-", "-q", *TINY, stdin=f"When {HOSTILE}?"))


def test_json_on_stdout(hostile):
    answered = hostile("answer", f"When {HOSTILE}?", "--json", "--compare", *TINY)
    for result in (answered, hostile("store", "--json"), hostile("models", "--json")):
        _harmless(result)
        assert isinstance(result.json, dict)
    assert answered.json["question"] == f"When {HOSTILE}?"
    assert answered.json["model"] == str(hostile.model)
    assert OBEYED.search(answered.json["answer"])


def test_a_store_and_its_namespaces(hostile, tmp_path):
    shown = _harmless(hostile("store"))
    assert r"\x1b]0;owned\x07" in shown
    hostile = hostile.at(shutil.copytree(hostile.store, tmp_path / FILE_NAME))
    for path in (hostile.store / "kv" / "namespaces").glob("*.json"):
        words = json.loads(path.read_text()) | {"model": HOSTILE, "dtype": HOSTILE, "prefix_tokens": HOSTILE}
        path.write_text(json.dumps(words))
    assert "caches" in _harmless(hostile("store"))
    _harmless(hostile("store", "--json"))
    for name in ("objects", "namespaces"):
        shutil.rmtree(hostile.store / "kv" / name)
    (hostile.store / "kv" / "objects" / FILE_NAME).mkdir(parents=True)
    _harmless(hostile("store"))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / f"{FILE_NAME}.jsonl"
    chunks = [{"title": HOSTILE, "text": f"Hall {part} has {part + 3} doors. {HOSTILE} " * 3} for part in range(3)]
    record = {"question": f"{HOSTILE}?", "answers": [HOSTILE], "chunks": chunks}
    numbered = ({**record, "id": f"q{number} {HOSTILE}", "task": f"{number}{HOSTILE}"} for number in range(2))
    path.write_text("\n".join(map(json.dumps, numbered)))
    return path


def test_a_report(hostile, dataset, tmp_path):
    numbers = tmp_path / f"{FILE_NAME}.json"
    result = hostile("report", "--dataset", dataset, "--json", numbers, *TINY)
    shown = _harmless(result)
    assert r"\x1b[2J" in shown
    assert "[bold]loud[/bold]" in shown
    assert not OBEYED.search(numbers.read_text())
    assert {record["task"] for record in json.loads(numbers.read_text())["records"]} == {f"0{HOSTILE}", f"1{HOSTILE}"}
    _harmless(hostile("report", "--dataset", dataset, "--limit", "1", "--json", "-", *TINY))


def test_an_analysis(hostile, dataset, tmp_path):
    page, numbers = tmp_path / f"{FILE_NAME}.html", tmp_path / f"{FILE_NAME}.json"
    _harmless(hostile("analyze", "--dataset", dataset, "--html", page, "--json", numbers))
    for path in (page, numbers):
        assert not OBEYED.search(path.read_text())
    _harmless(hostile("analyze", f"When {HOSTILE}?", "--json", numbers))
    assert json.loads(numbers.read_text())["records"][0]["question"] == f"When {HOSTILE}?"


def test_mistakes_and_what_is_not_there(blend, hostile_model, tmp_path):
    nowhere, records, file = (tmp_path / f"{FILE_NAME}{suffix}" for suffix in ("", ".jsonl", ".file"))
    records.write_text(json.dumps({"id": HOSTILE, "question": "x", "chunks": HOSTILE}))
    file.write_text("")
    for code, call in (
        (2, (HOSTILE,)),
        (2, ("answer", "x", f"--{HOSTILE}")),
        (2, ("answer", "x", "--selector", f"query_guided:layers={HOSTILE}")),
        (2, ("answer", "x", "--ratio", HOSTILE)),
        (2, ("answer", "x", "--device", HOSTILE)),
        (8, ("answer", "x", "--store", nowhere)),
        (7, ("store", "--store", tmp_path / os.fsdecode(b"\xff\x9b"))),
        (7, ("precompute", ".", "--store", file)),
        (8, ("precompute", nowhere)),
        (6, ("report", "--dataset", nowhere)),
        (6, ("report", "--dataset", records)),
        (2, ("report", "--json", file / "below")),
        (2, ("analyze", "x", "--html", file / "below")),
        (8, ("corpus", tmp_path / "c", "--module", HOSTILE)),
    ):
        result = blend.here(*call)
        _harmless(result, code)
        assert result.err.count("\n") == 1
        one_line(result.err)
    assert OBEYED.search(str(hostile_model))
    _harmless(blend("corpus", nowhere, "--module", "csv"))


@pytest.mark.parametrize("name", ["KVBLEND_MODEL", "KVBLEND_STORE", "KVBLEND_DEVICE", "KVBLEND_DTYPE"])
def test_the_environment(filled, name):
    for value in (HOSTILE, f"./{HOSTILE}", os.fsdecode(b"\xff\x9b")):
        blend = replace(filled, env={name: value})
        result = blend.here("answer", "x", "-q")
        assert result.code in (2, 5, 8)
        _harmless(result, result.code)
        one_line(result.err)
        assert not console.errors.quiet, "-q is for that command alone"


def test_a_bug_shows_its_traceback_and_where_to_report_it(capsys):
    def bug() -> None:
        raise RuntimeError(HOSTILE)

    assert exit_code_of(bug) == 1
    shown = capsys.readouterr().err
    assert not OBEYED.search(shown)
    assert "RuntimeError" in shown
    assert re.search(r"^blend: this is a bug .*`blend env`", shown.splitlines()[-1])


def test_all_text_goes_through_the_console():
    """The next command cannot forget: only these modules write, and both make text visible first."""
    calls = {
        (path.stem, ast.unparse(node.func))
        for path in (REPOSITORY / "blend" / "cli").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    }
    writers = {module for module, call in calls - {("answer", "output.print")} if call.endswith(WRITING)}
    assert writers <= {"console", "__init__"}

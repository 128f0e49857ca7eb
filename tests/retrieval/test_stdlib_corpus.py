import re

import pytest
from places import run_python

from blend_retrieval import corpus_stdlib
from blend_retrieval.corpus_stdlib import DEFAULT_MODULES, SIDE_EFFECTS, write_stdlib_corpus
from blend_retrieval.demo_questions import DEMO_QUESTIONS
from blend_retrieval.errors import CorpusError
from blend_retrieval.headings import markdown_headings
from blend_retrieval.loading import load_documents


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_stdlib_corpus(folder)
    return {document.title: document for document in load_documents(folder).documents}


def flat(text):
    return " ".join(text.split())


def test_one_document_a_module_of_sensible_size(corpus):
    assert set(DEFAULT_MODULES) - set(corpus) <= {"sqlite3", "gzip", "zipfile", "hashlib"}
    characters = sum(len(document.text) for document in corpus.values())
    assert 130_000 < characters < 185_000  # some 40,000 tokens of Qwen2.5's tokenizer
    assert max(len(document.text) for document in corpus.values()) < 5_600


def test_headings_are_the_members(corpus):
    headings = {heading.text: heading.level for heading in markdown_headings(corpus["collections"].text)}
    assert headings["collections"] == 1
    assert headings["Counter.most_common(n=None)"] == 3
    names = [name for name, level in headings.items() if level == 2]
    assert names
    assert all(name.startswith("collections.") for name in names)


def test_nothing_that_changes_from_run_to_run(corpus, tmp_path):
    text = "".join(document.text for document in corpus.values())
    assert not re.search(r" at 0x[0-9a-f]{6}|Ellipsis", text)
    paths = write_stdlib_corpus(tmp_path, ["csv", "functools", "random"])
    assert [path.name for path in paths] == ["csv.md", "functools.md", "random.md"]
    for path in paths:
        assert path.read_text(encoding="utf-8").rstrip() == corpus[path.stem].text


def test_a_second_run_touches_nothing(tmp_path):
    (path,) = write_stdlib_corpus(tmp_path, ["bisect"])
    before = path.stat().st_mtime_ns
    write_stdlib_corpus(tmp_path, ["bisect"])
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "name", ["antigravity", "this", "idlelib.idle", "test.support", "numpy", "no such", "../x", ""]
)
def test_modules_that_do_not_belong_are_refused_unimported(tmp_path, name, monkeypatch):
    monkeypatch.setattr(corpus_stdlib, "render", lambda names: pytest.fail("imported"))
    with pytest.raises(CorpusError, match="leave it out"):
        write_stdlib_corpus(tmp_path, ["csv", name])
    assert list(tmp_path.iterdir()) == []


def test_defaults_have_no_side_effects_and_modules_stay_out_of_this_process(tmp_path):
    assert not SIDE_EFFECTS & {name.partition(".")[0] for name in DEFAULT_MODULES}
    script = (
        "import sys\n"
        "from blend_retrieval.corpus_stdlib import write_stdlib_corpus\n"
        f"write_stdlib_corpus({str(tmp_path)!r}, ['sqlite3', 'statistics', 'wave'])\n"
        "print({'sqlite3', 'statistics', 'wave', 'numpy', 'torch'} & set(sys.modules))"
    )
    run = run_python(script)
    assert run.stdout.strip() == "set()", run.stderr


def test_missing_modules_are_left_out_and_nothing_at_all_is_an_error(tmp_path):
    assert [path.stem for path in write_stdlib_corpus(tmp_path, ["csv", "json.nothing"])] == ["csv"]
    with pytest.raises(CorpusError, match="can be imported"):
        write_stdlib_corpus(tmp_path, ["json.nothing"])


@pytest.mark.parametrize("question", DEMO_QUESTIONS, ids=lambda question: question.question[:40])
def test_answers_stand_in_the_last_document(corpus, question):
    assert set(question.modules) <= set(corpus)
    *first, last = (flat(corpus[name].text) for name in question.modules)
    assert question.answers[0] in last
    assert not any(question.answers[0] in text for text in first), "it takes both modules"
    assert question.question.endswith("?")

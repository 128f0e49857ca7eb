"""The JSON and the page: nothing undefined in the one, nothing loaded by the other."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import pytest
from analyzed import FIRST_K, LAYOUT, analyzed
from cases import make_layout
from models import LAYERS

from blend.analyze.document import Analyzed, analysis_document, page_text, prompt_document
from blend.analyze.numbers import summarize
from blend.config import BlendConfig
from blend.eval.report import RunInfo
from blend.layout import PromptLayout

ASSETS = {file.name: file.read_text(encoding="utf-8") for file in files("blend.analyze").joinpath("assets").iterdir()}
SCRIPTS = "\n".join(text for name, text in ASSETS.items() if name.endswith(".js"))


def _document(
    *layouts: PromptLayout, config: BlendConfig = FIRST_K, question: str = "why?", titles: tuple[str, ...] = ()
) -> dict[str, Any]:
    prompts = []
    for number, layout in enumerate(layouts or (LAYOUT,)):
        found = analyzed("llama", config, layout)
        identity = {"id": f"p{number}", "question": question}
        view = prompt_document(found, config, identity, pictures=number == 0, titles=titles)
        prompts.append(Analyzed(identity, summarize(found), found.mapped, view))
    return analysis_document(prompts, RunInfo("tiny", "made up", "blend analyze", config.plain()), ("a note",))


@pytest.mark.parametrize(
    ("selector", "chunks"),
    [("hkvd", (9,)), ("query_guided", (1, 1)), ("mixed", (20, 13)), ("none", (1, 1)), ("all", (9,))],
)
def test_the_document_is_plain_json(selector, chunks):
    document = _document(make_layout(chunks=chunks), config=BlendConfig(selector=selector, ratio=0.3))
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert all(sentence.endswith(".") and "nan" not in sentence for sentence in document["readings"].values())


def test_what_is_in_the_document():
    document = _document(LAYOUT, make_layout(chunks=(8, 9)))
    assert document["head"]["tokens"] == (LAYOUT.rows + 5 + 17 + 7) / 2
    first, second = document["prompts"]
    assert first["pictures"]["cells"] == LAYOUT.rows
    assert len(first["pictures"]["layers"]) == LAYERS
    assert second["pictures"] is None
    assert all(len(score["values"]) == LAYOUT.rows for score in first["scores"])
    assert [s["name"] for s in first["segments"]] == ["prefix", "chunk 1", "chunk 2", "chunk 3", "chunk 4", "question"]
    assert first["shown"] in [score["name"] for score in first["scores"]]


def test_chunks_carry_their_titles():
    titles = ("Harbour", "", "Bell", "Market")
    (prompt,) = _document(titles=titles)["prompts"]
    assert [segment["title"] for segment in prompt["segments"]] == ["", *titles, ""]
    assert re.search(
        r"the question reads chunk [134], (Harbour|Bell|Market), most|reads chunk 2 most", prompt["question_reading"]
    )
    with pytest.raises(ValueError, match="argument"):
        _document(titles=titles[:2])


BREAKOUT = (
    "</script></title><script>alert(1)</script><!--<script><img src=x onerror=alert(1)>\" onload='x' ]]> --> &lt;b&gt; "
    "\u2028\u2029\x00\x1b]0;t\x07\x9b2J\u202e @TITLE@ @STYLE@ @DATA@ @SCRIPT@ @SCRIPT_HASH@"
)


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements, self.comments, self.scripts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts.append(data)

    @property
    def shape(self) -> list[tuple[str, list[str]]]:
        return [(tag, sorted(attributes)) for tag, attributes in self.elements]


def test_no_text_of_a_document_becomes_markup_or_script():
    """Question, id, title, tokens, notes, names and every other string: the page has the same elements and the same script."""
    document = _document()
    hostile = _with_text(document, BREAKOUT)
    text = page_text(hostile)
    plain_page, hostile_page = _Page(page_text(document)), _Page(text)
    assert hostile_page.shape == plain_page.shape
    assert not hostile_page.comments
    for tag, names in hostile_page.shape:
        assert not {tag, *names} & {
            "link",
            "iframe",
            "img",
            "object",
            "embed",
            "src",
            "href",
            "srcset",
            "data",
            "action",
        }
    assert json.loads(hostile_page.scripts[0]) == hostile
    assert hostile_page.scripts[1:] == plain_page.scripts[1:]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]", text)


def _with_text(value: Any, text: str) -> Any:
    if isinstance(value, dict):
        return {key: _with_text(item, text) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_text(item, text) for item in value]
    return text if isinstance(value, str) else value


def test_the_page_runs_its_own_script_alone():
    """Were markup to slip through, its scripts and handlers would not run: the policy names the hash of the page's own."""
    page = _Page(page_text(_document(question=BREAKOUT)))
    metas = [attributes for _, attributes in page.elements if "http-equiv" in attributes]
    (policy,) = (meta["content"] for meta in metas if meta["http-equiv"] == "Content-Security-Policy")
    rules = [rule.strip() for rule in policy.split(";")]
    digest = base64.b64encode(hashlib.sha256("".join(page.scripts[1:]).encode()).digest()).decode()
    assert "default-src 'none'" in rules
    assert [rule for rule in rules if "script" in rule] == [f"script-src 'sha256-{digest}'"]


def test_what_the_scripts_put_into_the_page_is_escaped():
    """Every text out of the document that a script writes as markup goes through `escapeText`."""
    wanted = re.compile(
        r"\.(name|title|label|question|id|model|workload|command)\b|tokens\[|kinds\[|\bnote\b|\bnames?\[|\bsaid\b"
    )
    for line in SCRIPTS.splitlines():
        for markup in re.findall(r"`<[^`]*`", line):
            for put in re.findall(r"\$\{([^{}`]*)\}", markup):
                assert put.startswith(("escapeText(", "seen.has(")) or not wanted.search(put), put


def test_the_assets_reach_for_nothing():
    for name, text in ASSETS.items():
        assert not re.search(r"https?:|//[a-z]|@import|url\(|\bfetch\(|XMLHttpRequest|import\(", text), name


def test_every_picture_has_its_place_and_its_sentence():
    template = ASSETS["page.html"]
    ids = set(re.findall(r'id="([\w-]+)"', template))
    wanted = set(re.findall(r'(?:getElementById|put|say|places|draw)\("([\w-]+)"', SCRIPTS))
    assert wanted <= ids, wanted - ids
    assert set(re.findall(r'data-reading="(\w+)"', template)) == set(_document()["readings"])

"""The JSON and the page: nothing undefined in the one, nothing loaded by the other."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from analyzed import FIRST_K, LAYOUT, analyzed
from cases import make_layout
from models import LAYERS

from blend.analyze import (
    Analyzed,
    RunFacts,
    analysis_document,
    page_text,
    prompt_document,
    summarize,
    write_json,
    write_page,
)
from blend.analyze.document import plain
from blend.config import BlendConfig
from blend.errors import ConfigError
from blend.types import PromptLayout

HOSTILE = "</script><img src=http://example.org/x.png> @DATA@ @SCRIPT@ <!-- "


def _document(*layouts: PromptLayout, config: BlendConfig = FIRST_K, question: str = "why?") -> dict[str, Any]:
    prompts = []
    for number, layout in enumerate(layouts or (LAYOUT,)):
        found = analyzed("llama", config, layout)
        identity = {"id": f"p{number}", "question": question}
        view = prompt_document(found, config, identity, pictures=number == 0)
        prompts.append(Analyzed(identity["id"], question, summarize(found), found.mapped, view))
    return analysis_document(prompts, RunFacts("tiny", "made up", "blend analyze", config, ("a note",)))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        assert all(isinstance(key, str) for key in value)
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


@pytest.mark.parametrize("selector", ["hkvd", "query_guided", "mixed", "first_k", "random", "none", "all"])
@pytest.mark.parametrize("chunks", [(9,), (1, 1), (20, 13)], ids=str)
def test_the_document_is_plain_json(selector: str, chunks: tuple[int, ...]) -> None:
    document = _document(make_layout(chunks=chunks), config=BlendConfig(selector=selector, ratio=0.3))
    for leaf in _leaves(document):
        assert leaf is None or isinstance(leaf, str | bool | int | float)
        assert not isinstance(leaf, float) or math.isfinite(leaf)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert all(sentence.endswith(".") and "nan" not in sentence for sentence in document["readings"].values())


def test_what_is_in_the_document() -> None:
    document = _document(LAYOUT, make_layout(chunks=(8, 9)))
    assert len(document["records"]) == 2
    assert document["head"]["tokens"] == (LAYOUT.rows + 5 + 17 + 7) / 2
    first, second = document["prompts"]
    assert first["pictures"]["cells"] == LAYOUT.rows
    assert len(first["pictures"]["layers"]) == LAYERS
    assert second["pictures"] is None
    assert len(first["tokens"]) == len(first["kinds"]) == LAYOUT.rows
    assert all(len(score["values"]) == LAYOUT.rows for score in first["scores"])
    assert [s["name"] for s in first["segments"]] == ["prefix", "chunk 1", "chunk 2", "chunk 3", "chunk 4", "question"]
    assert first["shown"] in [score["name"] for score in first["scores"]]


def test_undefined_numbers_are_null_and_numbers_are_short() -> None:
    assert plain({"a": [math.nan, math.inf, 1 / 3, 123456.78, 3, True, None]}) == {
        "a": [None, None, 0.33333, 123460.0, 3, True, None]
    }


def test_the_page_loads_nothing_and_holds_the_document() -> None:
    document = _document(question=HOSTILE)
    document["prompts"][0]["tokens"][0] = HOSTILE
    page = _Page()
    page.feed(page_text(document))
    assert page.scripts == [{"type": "application/json", "id": "data"}, {}]
    assert json.loads(page.bodies[0]) == document
    assert "default-src 'none'" in page.policy
    assert not page.links


def test_the_assets_reach_for_nothing() -> None:
    for asset in files("blend.analyze").joinpath("assets").iterdir():
        text = asset.read_text(encoding="utf-8")
        assert not re.search(r"https?:|//[a-z]|@import|url\(|\bfetch\(|XMLHttpRequest|import\(", text), asset.name


def test_every_picture_has_its_place_and_its_sentence() -> None:
    assets = {
        asset.name: asset.read_text(encoding="utf-8") for asset in files("blend.analyze").joinpath("assets").iterdir()
    }
    document = _document()
    template = assets["page.html"]
    ids = set(re.findall(r'id="([\w-]+)"', template))
    scripts = "".join(text for name, text in assets.items() if name.endswith(".js"))
    wanted = set(re.findall(r'(?:getElementById|put|say|places|draw)\("([\w-]+)"', scripts))
    assert wanted <= ids, wanted - ids
    assert set(re.findall(r'data-reading="(\w+)"', template)) == set(document["readings"])


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    document = _document()
    write_json(document, tmp_path / "new" / "out.json")
    write_page(document, tmp_path / "out.html")
    assert json.loads((tmp_path / "new" / "out.json").read_text()) == document
    assert (tmp_path / "out.html").read_text() == page_text(document)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_page(document, tmp_path / "out.html" / "below.html")


class _Page(HTMLParser):
    """Scripts, what they hold, and everything that would load something."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[dict[str, str | None]] = []
        self.bodies: list[str] = []
        self.links: list[str] = []
        self.policy = ""
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [name for name in ("src", "href", "srcset", "data", "action") if name in given]
        self.links += [tag] if tag in ("link", "iframe", "img", "object", "embed") else []
        if tag == "meta" and given.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(given["content"])
        if tag == "script":
            self._inside = True
            self.scripts.append(given)
            self.bodies.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.bodies[-1] += data

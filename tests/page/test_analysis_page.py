"""The page of `blend analyze` in a browser: pictures keep their size, and chunks are called by their titles."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from blend.cli import blend as group
from tests import towns
from tests.tiny_model import save_tiny_model

TITLES = ["Port Rowan > Harbour > The gates and who keeps them through the winter months", "Bell", "", "Market"]
GROWTH = 1.25  # of a picture over its natural size, at most
# Of every picture: its width over its natural one, and how far its texts reach over its left edge.
MEASURE = """() => [...document.querySelectorAll("svg[role=img]")].map((svg) => {
  const box = svg.getBoundingClientRect();
  const lefts = [...svg.querySelectorAll("text")].map((text) => text.getBoundingClientRect().left);
  return [svg.getAttribute("aria-label"), box.width / svg.viewBox.baseVal.width, box.left - Math.min(...lefts)];
})"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two prompts; only the first has a token-by-token picture."""
    folder = tmp_path_factory.mktemp("analysis")
    texts = towns.documents()
    chunks = [{"title": title, "text": text[:300]} for title, text in zip(TITLES, texts.values(), strict=False)]
    records = [{"id": f"q{number}", "question": "How many gates?", "chunks": chunks[: 4 - number]} for number in (0, 1)]
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    model = save_tiny_model(folder / "tiny", "\n".join(texts.values()))
    words = ("--dataset", questions, "--model", model, "--store", folder / "store", "--html", folder / "page.html")
    result = CliRunner().invoke(group, ["analyze", *map(str, words)])
    assert result.exit_code == 0, result.output
    return folder / "page.html"


@pytest.mark.parametrize("width", [420, 900, 1280])
def test_pictures_keep_their_size_and_chunks_their_titles(page: Path, browser: Any, width: int):
    tab = browser.new_page(viewport={"width": width, "height": 900})
    errors: list[object] = []
    tab.on("pageerror", lambda error: errors.append(error))
    tab.goto(page.as_uri())
    for prompt in (0, 1):  # the second has no token-by-token picture beside its map
        tab.locator("select").first.select_option(index=prompt)
        sizes = tab.evaluate(MEASURE)
        assert len(sizes) >= 12
        for label, growth, overhang in sizes:
            assert growth <= GROWTH + 0.01, label
            assert overhang <= 1, label
        rows = tab.locator("#chunk-deviation text").all_text_contents()
        assert "2 \u00b7 Bell" in rows
        assert "chunk 3" in rows
        assert any(row.startswith("1 \u00b7 \u2026") and row.endswith("winter months") for row in rows)
        assert f"chunk 1 \u00b7 {TITLES[0]}" in tab.locator("#text").inner_text()
    assert not errors
    tab.close()

"""Pictures and the page of a report: what they hold, that nobody's text is obeyed in them, and what is refused."""

import random
import re
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from PIL import Image

from blend.errors import ConfigError
from blend.eval.page import report_page, write_page
from blend.eval.picture import INK, check_picture, panels_as_svg, require_matplotlib, write_picture
from blend.eval.report import Measurement, RunInfo, summarise

HOSTILE = '<script>alert("x")</script> @BODY@ $\\frac$ \x1b[31m & "quotes"'
METHODS = {
    "full": (1.0, 1.0, 0.0),
    "reuse": (0.05, 0.02, 1.5),
    "query_guided": (0.2, 0.17, 0.1),
    "hkvd": (0.25, 0.2, 0.4),
}


def rows_of(records, question=HOSTILE, gold=("Osk",)):
    rng = random.Random(0)
    rows = []
    for place in range(records):
        full_s = rng.uniform(4, 8)
        for name, (time, share, kl) in METHODS.items():
            said = f"Bell {place} is kept by {name}." if name != "full" else f"Bell {place} is kept by Osk {HOSTILE}."
            scores = {"f1": 0.5, "right": name != "hkvd"} if gold else {}
            row = Measurement(
                name,
                f"q{place}",
                said if kl != 0.1 or place % 2 else f"Bell {place} is kept by Osk {HOSTILE}.",
                full_s * time,
                {},
                2000,
                2000 * share,
                kl=kl * (place + 1),
                question=question,
                gold=gold,
                **scores,
            )
            rows.append(row)
    return rows


@pytest.fixture(scope="module")
def report():
    return summarise(rows_of(7), info=RunInfo("tiny$^2", HOSTILE, "blend report", dtype="float32"))


def test_a_picture_is_what_its_suffix_says_and_the_same_each_time(report, tmp_path):
    picture = tmp_path / "new folder" / "report.png"
    check_picture(picture)
    write_picture(report, picture)
    with Image.open(picture) as image:
        width, height = image.size
        assert width > 2 * height > 800
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50
    for name in ("one.svg", "two.SVG"):
        write_picture(report, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.SVG").read_bytes()
    ET.parse(tmp_path / "one.svg")


def test_panels_that_have_nothing_to_show_are_left_out(report):
    everything = panels_as_svg(report)
    assert list(everything) == [
        "KL against time to first token",
        "KL against rows computed",
        "Answers that differ from full's",
    ]
    for svg in everything.values():
        assert INK in svg
        ET.fromstring(svg)
    rows = [row for row in rows_of(2, gold=()) if row.method in ("full", "reuse")]
    undefined = [Measurement(row.method, row.record_id, row.answer, 1.0, {}, 9, 9.0) for row in rows]
    assert list(panels_as_svg(summarise(undefined))) == ["Answers that differ from full's"]


class Page(HTMLParser):
    """What a browser makes of a page: elements, ids, and the text of articles."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.ids = []
        self.links = []
        self.articles = []
        self.marks = []
        self.open = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href")]
        self.ids += [value for name, value in attributes if name == "id"]
        if tag == "article":
            self.articles.append("")
        if tag == "mark":
            self.marks.append("")
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        self.text += data
        if "article" in self.open:
            self.articles[-1] += data
        if "mark" in self.open:
            self.marks[-1] += data


@pytest.fixture(scope="module")
def page(report):
    return Page(report_page(report))


def test_the_page_shows_tables_pictures_and_answers_side_by_side(page, report):
    assert page.tags.count("svg") == 3
    assert page.tags.count("table") == 2
    five, all_changed = page.articles[:5], page.articles[5:]
    assert [text[:2] for text in five] == ["q6", "q5", "q4", "q3", "q2"]
    assert "Bell 6 is kept by Osk" in five[0]
    assert "Bell 6 is kept by hkvd." in five[0]
    assert "query_guided · KL 0.700 · the same as full's" in five[0]
    assert "hkvd · KL 2.800 · worse" in five[0]
    assert "gold: Osk" in five[0]
    assert len(all_changed) == len(report.changed) == 17
    assert "hkvd." in page.marks
    assert not any("kept" in mark for mark in page.marks)
    assert "answers changed: 100%" in page.text


def test_nobodys_text_is_obeyed_in_the_page(page, report):
    text = report_page(report)
    assert not {"script", "link", "img", "iframe", "base"} & set(page.tags)
    assert page.tags.count("body") == page.tags.count("title") == page.tags.count("h1") == 1
    assert '<script>alert("x")</script> @BODY@ $\\frac$ \\x1b[31m & "quotes"' in page.articles[0]
    assert "\x1b" not in text
    assert "default-src 'none'" in text
    assert page.links
    assert all(link.startswith("#") for link in page.links)
    assert len(page.ids) == len(set(page.ids)) > 50
    assert INK not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)


def test_a_page_without_changed_answers_says_so(tmp_path):
    rows = [row for row in rows_of(2) if row.method == "full"]
    same = [Measurement("blend", row.record_id, row.answer, 1.0, {}, 9, 9.0, kl=0.0) for row in rows]
    write_page(summarise([*rows, *same]), tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "No answer of blended prefill differs." in page.text
    assert page.articles == []


def test_what_cannot_be_drawn_is_refused_in_a_line(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"report\.pdf: a picture ends in \.png or \.svg"):
        check_picture(tmp_path / "report.pdf")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        check_picture(tmp_path / "file" / "report.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"^--picture draws pictures.*pip install .*report"):
        check_picture(tmp_path / "report.png")
    with pytest.raises(ConfigError, match="--html"):
        require_matplotlib("--html")

"""What pages say in place of pictures, and in their headers and footers: in HTML, e-books and mails."""

from email.message import EmailMessage

import pytest
from office_files import zipped_files

from blend_retrieval.loading import load_bytes

STARS = "[picture: star] [picture: star] [picture: star]"


def text_of(html):
    (document,), skipped = load_bytes("page.html", html.encode())
    assert not skipped
    return document.text


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<p>Pier<img src=p.png alt='Pier 3, 40 m'>and quay</p>", "Pier [picture: Pier 3, 40 m] and quay"),
        ("<figure><img src=m.png alt='Mast, 4 m'><figcaption>A mast</figcaption></figure>", "[picture: Mast, 4 m]\n\n*A mast*"),
        ("<a href=/big><img src=p.png alt='Pier 3'></a>", "[picture: Pier 3]"),
        ("<img src='http://[x' alt='Pier 3'><label><img alt=Fee><input value=3></label>", "[picture: Pier 3] [picture: Fee] 3"),
        ("<picture><source srcset=x><img src=x.webp alt='Quay 9'></picture>", "[picture: Quay 9]"),
        ("<map><area href=n alt='North 7'><area href=s alt='South 8'></map>", "[picture: North 7] [picture: South 8]"),
        ("<form><input type=image src=b.png alt='Pay 31'></form>", "[picture: Pay 31]"),
        ("<svg><title>Flow of 40 l</title><text>Pump</text></svg>", "[picture: Flow of 40 l] Pump"),
        ("<svg><title>Pump</title><text>Pump</text></svg>", "Pump"),
        ("<div role=img aria-label='Gauge: 31 bar'></div>", "[picture: Gauge: 31 bar]"),
        ("<p>Click <img src=ok.png alt=ok> to pay.</p>", "Click [picture: ok] to pay."),
        ("<p>Open <img src=t.png width=16 alt='✓'> <img src=e.png alt='😀'></p>", "Open ✓ 😀"),
        ("<p>Rated <img src=s alt=star><img src=s alt=star><img src=s alt=star></p>", f"Rated {STARS}"),
    ],
)  # fmt: skip
def test_the_text_of_a_picture_stands_in_its_place(html, text):
    assert text_of(html) == text


def test_a_small_picture_that_is_a_cells_value_is_read_in_every_row():
    rows = "".join(f"<tr><td>{pier}</td><td><img src={word}.png width=16 alt={word}></td></tr>" for pier, word in OPEN)
    lines = text_of(f"<table><tr><th>Pier</th><th>Open</th></tr>{rows}</table>").splitlines()
    assert lines[2:] == [f"| {pier} | [picture: {word}] |" for pier, word in OPEN]


OPEN = [(1, "yes"), (2, "no"), (3, "yes"), (4, "yes")]


@pytest.mark.parametrize(
    "picture",
    [
        "<img src=p.png>",
        "<img src=p.png alt=''>",
        "<img src=/x/pier.png alt=pier.png>",
        "<img src=/x/pier-3.png alt=pier-3>",
        "<img src=cid:7 alt=image001.png>",
        "<img src=p.png alt=Photo>",
        "<img src=p.png alt='Fee 31'>",  # as the text beside it
        "<img src=p.png alt='Pier 3' width=16 height=16>",
        "<img src=p.png alt='Pier 3' width=1>",
        "<img src=p.png alt='Pier 3' style='height: 12px'>",
        "<img src=p.png alt='Pier 3' style='display: none'>",
        "<img src=p.png alt='Pier 3' aria-hidden=true>",
        "<img src=p.png alt='Pier 3' role=presentation>",
        "<img src=p.png alt='*'>",
        "<a href=/x><img src=p.png alt=Next></a>",
        "<a href=https://orm.example><img src=p.png alt='Orm logo'></a>",
        "<svg aria-hidden=true><title>Gear</title></svg>",
        "<svg width=16 height=16><title>Gear</title></svg>",
    ],
)
def test_decoration_has_no_text(picture):
    assert text_of(f"<div>{picture} Fee 31</div>") == "Fee 31"


def test_repeated_pictures_are_bullets_where_they_open_lines_and_leave_words_apart():
    items = [f"<p><img src=b.gif alt='To the right'>{word}</p>" for word in ("one", "two", "three")]
    assert text_of("".join(items)) == "one\n\ntwo\n\nthree"
    hazards = [f"<p>{word} <img src=d.gif alt=Toxic></p>" for word in ("one", "two", "three")]
    assert text_of("".join(hazards)).count("[picture: Toxic]") == 3
    doses = [f"<p><img src=d.gif alt='40 ppm'>{word}</p>" for word in ("one", "two", "three")]
    assert text_of("".join(doses)).count("[picture: 40 ppm]") == 3
    assert text_of("<p>1<img src=s.gif width=1 alt=gap>2</p>") == "1 2"


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        ("<p>Contract no. 4711</p>", "Contract no. 4711"),
        ("Archive no. <a href=/a>4712</a>", "Archive no. 4712"),
        ("<a href=mailto:a@orm.example>a@orm.example</a>", "a@orm.example"),
        ("<a href=/a>Archive no. 4712</a>", "Archive no. 4712"),
        ("<label>Contract no.: <input value=4711></label>", "Contract no.: 4711"),
        ("<a href=/>Orm</a><ul><li><a href=/a>Piers</a><li><a href=/b>V8</a></ul><b>Draft of May</b>", "**Draft of May**"),
        ("<table><tr><td>Contract</td><td>4711</td></tr></table>", "| Contract | 4711 |"),
        ("&copy; Copyright 2020-2024, Port of Orm. Last updated on May 3, 2021.", "Last updated on May 3, 2021."),
        ("Copyright 2024 Orm, licence no. 4711", "Copyright 2024 Orm, licence no. 4711"),
        ("Registered in Orm, no. 12.<br>All rights reserved.", "Registered in Orm, no. 12."),
        ("Created by Anna on 3 May.", "Created by Anna on 3 May."),
        ("&copy;2024, Orm. | Powered by <a href=s>Sphinx 7.1</a> | <a href=x>Page source</a>", ""),
        ("Built with <a href=s>Sphinx</a> using a <a href=t>theme</a> provided by <a href=r>Read the Docs</a>.", ""),
        ("<a href=n class=next-page><div>Next</div><div>Chapter 2</div></a>", ""),
        ("<a href=#main>Skip to content</a><button>Theme</button><form action=/search><label>Find <input></label></form>", ""),
        ("<nav>Menu</nav><a href=a>Orm</a> | <a href=b>Imprint</a>", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tag", ["header", "footer", "div role=contentinfo"])
def test_frames_of_a_page_keep_what_says_something_of_it(tag, frame, text):
    document = text_of(f"<body><{tag}>{frame}</{tag.split()[0]}><p>Fee 31.</p></body>")
    lines = [line for line in document.split("\n\n") if line != "Fee 31."]
    assert "\n".join(lines).partition("\n| ---")[0].rstrip() == text


def test_frames_of_articles_keep_their_links_and_repeated_frames_are_read_once():
    article = "<article><header><h2><a href=a>Piers</a></h2></header>Text.<footer><a href=t>Anna</a></footer></article>"
    footer = "<article><footer>&copy; 2024 Orm.<br><a rel=next href=n>Two</a></footer></article>"
    assert text_of(article + footer) == "## Piers\n\nText.\n\nAnna"
    assert text_of("<header role=banner>No. 4711</header>Text.<header>No. 4711</header>") == "No. 4711\n\nText."


def test_an_address_stands_where_a_link_has_no_text():
    links = "<a href='https://orm.example/a_b'></a>, <a href=https://orm.example/x>fees</a><a href='#top'></a>"
    assert text_of(f"<p>See {links}.</p>") == "See https://orm.example/a_b, fees."


def test_pictures_and_frames_of_e_books_and_mails():
    body = "<header>Contract no. 4711</header><img src='m.png' alt='Mast, 4 m'/><footer>Archive no. 55</footer>"
    text = "Contract no. 4711\n\n[picture: Mast, 4 m]\n\nArchive no. 55"
    pages = {"one": body, "cover": "<img src='c.png' alt='A harbour'/>"}
    items = "".join(f'<item id="{name}" href="{name}.xhtml"/>' for name in pages)
    spine = "".join(f'<itemref idref="{name}"/>' for name in pages)
    rootfile = '<container><rootfiles><rootfile full-path="book.opf"/></rootfiles></container>'
    package = f"<package><manifest>{items}</manifest><spine>{spine}</spine></package>"
    chapters = {f"{name}.xhtml": f"<html><body>{page}</body></html>" for name, page in pages.items()}
    book = zipped_files({"META-INF/container.xml": rootfile, "book.opf": package, **chapters})
    (document,), (skipped,) = load_bytes("book.epub", book)
    assert document.text == f"{text}\n\n[picture: A harbour]"
    assert (skipped.source, skipped.reason) == ("book.epub chapter cover.xhtml", "holds only pictures")

    mail = EmailMessage()
    mail["From"] = "anna@orm.example"
    mail.set_content("Mast, 4 m")
    mail.add_alternative("<img src='cid:1' alt='Mast, 4 m'>", subtype="html")
    (letter,), _ = load_bytes("a.eml", mail.as_bytes())
    assert letter.text.endswith("\n\nMast, 4 m"), "the plain text says the same"
    mail.clear_content()
    mail.set_content(body, subtype="html")
    (letter,), _ = load_bytes("a.eml", mail.as_bytes())
    assert letter.text.endswith(text)

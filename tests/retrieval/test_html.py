"""HTML pages: what a reader of the page sees is read, with its values, and nothing else."""

import pytest

from blend_retrieval.loading import load_bytes


def read(html):
    loaded = load_bytes("page.html", html if isinstance(html, bytes) else html.encode())
    assert not loaded.skipped
    (document,) = loaded.documents
    return document


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("10<sup>6</sup> litres", "10^6^ litres"),
        ("re&shy;placement", "replacement"),
        ("log<sub>2</sub>8 = 3", "log~2~8 = 3"),
        ("<math><mfrac><mn>1</mn><mn>2</mn></mfrac></math> cup", "1/2 cup"),
        ("<math><mn>3</mn><mfrac><mn>1</mn><mn>4</mn></mfrac></math>", "3 1/4"),
        ("<math><mfrac><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow><mn>2</mn></mfrac></math>", "(a+b)/2"),
        ("<math><mn>10</mn><msup><mrow></mrow><mn>6</mn></msup></math>", "10^6"),
        (
            "<math><msub><mi>a</mi><mn>12</mn></msub><msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup></math>",
            "a_12x_1^2",
        ),
        ("<math><msup><mrow><mo>-</mo><mi>x</mi></mrow><mn>2</mn></msup></math>", "(-x)^2"),
        ("<math><msqrt><mi>x</mi><mo>+</mo><mn>1</mn></msqrt></math>", "√(x+1)"),
        ("<math><mroot><mn>8</mn><mn>3</mn></mroot></math>", "8^(1/3)"),
        ("<math><mtable><mtr><mtd>1</mtd><mtd>2</mtd></mtr><mtr><mtd>3</mtd></mtr></mtable></math>", "[1, 2; 3]"),
        ("<math><semantics><mn>7</mn><annotation>\\seven</annotation></semantics></math>", "7"),
        ("<b>bold</b> &amp; <a href='x'>link</a> a_b", "**bold** & link a_b"),
    ],
)
def test_numbers_formulas_and_words_keep_their_value(html, text):
    assert read(f"<p>{html}</p>").text == text


def test_cells_stay_in_their_columns():
    table = (
        "<table><tr><th>Harbour</th><th>Season</th><th>Fee</th></tr>"
        "<tr><td rowspan=2>Orm</td><td>summer</td><td>31</td></tr><tr><td>winter</td><td>12</td></tr>"
        "<tr><td colspan=2>all</td><td>5</td></tr></table>"
    )
    lines = [line.split("|") for line in read(table).text.splitlines() if "---" not in line]
    header, summer, winter, whole_year = ([cell.strip() for cell in line[1:-1]] for line in lines)
    assert header == ["Harbour", "Season", "Fee"]
    assert summer == ["Orm", "summer", "31"]
    assert winter == ["", "winter", "12"]
    assert (whole_year[0], whole_year[2]) == ("all", "5")


def test_a_page_in_a_form_is_read_with_what_was_typed():
    text = read(
        "<form><h1>Depot</h1><p>Rent: <input value='912 EUR'></p><input type=hidden value=token><input type=submit value=Go>"
        "</form><footer>Copyright</footer>"
    ).text
    assert text == "# Depot\n\nRent: 912 EUR"


@pytest.mark.parametrize("items", [3, 1500])
def test_list_items_without_end_tags_stay_apart(items):
    text = read("<p>Fees<ul>" + "".join(f"<li>pier {n}" for n in range(items)) + "</ul>").text
    assert text.splitlines() == ["Fees", "", *(f"- pier {n}" for n in range(items))]


def test_only_what_frames_a_page_is_dropped():
    document = read(
        "<title>The page</title><header>Site</header><nav>Menu</nav><div role=navigation>More menu</div>"
        "<header><h1>Fees</h1></header><p>Lead.</p>"
        "<article><header>3 May</header><p>Teaser.</p><footer>Fee: 31.</footer></article><pre>x = 1\n    y = 2</pre>"
        "<style>p{}</style><footer>Imprint</footer><script>x()</script><noscript>Enable scripts</noscript>"
    )
    assert document.title == "The page"
    code = "```\nx = 1\n    y = 2\n```"
    assert document.text.split("\n\n") == ["# Fees", "Lead.", "3 May", "Teaser.", "Fee: 31.", code]


def test_what_no_reader_of_the_page_sees_is_not_read():
    html = (
        "<p>Fee: 31.</p><div style='display: none'>99</div><p hidden>77</p><p style='visibility:hidden'>55</p>"
        "<template>33</template><dialog>11</dialog>"
    )
    assert read(html).text == "Fee: 31."


def test_a_page_that_is_nested_too_deeply_is_refused_rather_than_cut():
    documents, (skipped,) = load_bytes("page.html", b"<div>" * 3000 + b"down here")
    assert not documents
    assert "cannot be read whole" in skipped.reason


TEXT = "Причал открыт с 6 до 20, плата 30 крон."


@pytest.mark.parametrize(
    ("head", "encoding"),
    [
        ("<meta charset=koi8-r>", "koi8-r"),
        ("<meta http-equiv=content-type content='text/html; charset=windows-1251'>", "windows-1251"),
        ("<?xml version='1.0' encoding='iso-8859-5'?>", "iso-8859-5"),
        ("<meta charset=utf-16>", "utf-8"),
    ],
)
def test_the_declared_encoding_is_taken(head, encoding):
    assert read(f"{head}<p>{TEXT}</p>".encode(encoding)).text == TEXT

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
        ("<math><mfenced><mi>a</mi><mn>1</mn><mi>b</mi></mfenced></math>", "(a,1,b)"),
        (
            "<math><mi>x</mi><mo>∈</mo><mfenced open='[' close='[' separators=';'><mn>0</mn><mn>1</mn></mfenced></math>",
            "x∈[0;1[",
        ),
        ("<math><mfrac linethickness='0'><mn>5</mn><mn>2</mn></mfrac></math>", "(5; 2)"),
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
        "<title>The page</title><a class=md-skip href=#fees>Skip</a><header><a href=/>Site</a><hr></header>"
        "<nav>Menu</nav><div role=navigation>More menu</div>"
        "<header><h1>Fees</h1></header><p>Lead.</p>"
        "<article><header>3 May</header><p>Teaser.</p><footer>Fee: 31.</footer></article><pre>x = 1\n    y = 2</pre>"
        "<style>p{}</style><footer><a href=/imprint>Imprint</a></footer><script>x()</script><noscript>Enable scripts</noscript>"
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


def test_the_labels_of_a_drawing_are_read():
    drawing = "<svg><style>.a{}</style><path d='M0'/><g><text>Pump</text><text><tspan>40</tspan> l</text></g>"
    box = "<foreignObject><div>Tank <b>7</b></div></foreignObject></svg>"
    assert read(f"<p>Flow: {drawing}{box}.</p><svg><path d='M0'/></svg>").text == "Flow: Pump; 40 l; Tank 7 ."


@pytest.mark.parametrize("frame", [b"", b"<header>"])
def test_a_page_that_is_nested_too_deeply_is_refused_rather_than_cut(frame):
    documents, (skipped,) = load_bytes("page.html", frame + b"<div>" * 3000 + b"down here")
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


@pytest.mark.parametrize(
    ("lists", "lines"),
    [
        ("<ol><li value=9>a<li>b</ol>", ["9. a", "10. b"]),
        ("<ol start=5><li>a<li value=9>b<li>c</ol>", ["5. a", "9. b", "10. c"]),
        ("<ol reversed><li>a<li>b<li>c</ol>", ["3. a", "2. b", "1. c"]),
        ("<ol reversed start=8><li>a<li value=3>b<li>c</ol>", ["8. a", "3. b", "2. c"]),
        ("<ol start=-1><li>a<li>b</ol>", ["-1. a", "0. b"]),
        ("<ol type=a start=26><li>a<li>b</ol>", ["z. a", "aa. b"]),
        ("<ol style='list-style-type: upper-roman' start=3><li>a<li>b</ol>", ["III. a", "IV. b"]),
        ("<ol style='list-style: none'><li>1.1 a</ol>", ["- 1.1 a"]),
        ("<ol type=A><li>a<ol reversed><li>x<li>y</ol><li>b</ol>", ["A. a", "2. x", "1. y", "B. b"]),
        ("<table><tr><td><ol start=2><li>a<li>b</ol></table>", ["| 2. a 3. b |", "| --- |"]),
    ],
)
def test_lists_keep_their_numbers(lists, lines):
    assert [line.strip() for line in read(lists).text.splitlines() if line.strip()] == lines


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<p>Paid <input type=checkbox checked> in cash <input type=CHECKBOX></p>", "Paid [x] in cash [ ]"),
        ("<ul><li><input type=checkbox checked> rope<li><input type=checkbox> lamp</ul>", "- [x] rope\n- [ ] lamp"),
        ("<input type=radio name=p>north <input type=radio name=p checked> <b>south</b>", "[ ] north [x] **south**"),
        (
            "<p role=checkbox aria-checked=true>Paid</p><p role=radio aria-checked=false>Free</p>",
            "[x] Paid\n\n[ ] Free",
        ),
        ("<ul><li role=option aria-selected=true>north<li role=option>south</ul>", "- [x] north\n- south"),
        ("<button aria-pressed=false>Mute</button>", "[ ] Mute"),
        ("<p>Pier <select><option>north<option selected>south</select></p>", "Pier south"),
        ("<p>Pier <select><option selected>north<option selected>south</select></p>", "Pier south"),
        ("<p>Pier <select><option>north<option>south<option>east</select></p>", "Pier north (or: south, east)"),
        ("<p>Piers <select multiple><option selected>1<option>2<option selected>3</select></p>", "Piers 1, 3"),
        ("<p>Piers <select size=2><option>1<option>2</select></p>", "Piers [ ] 1, [ ] 2"),
        (
            "<select><optgroup label=North><option>1</optgroup><optgroup label=South><option selected>1</select>",
            "South: 1",
        ),
        ("<textarea>Fee: 31\n  per day</textarea>", "Fee: 31\nper day"),
        ("<p>Full to <progress value=30 max=100>bar</progress></p>", "Full to 30 of 100 (bar)"),
        ("<p>Level <meter value=.3></meter> <progress>unknown</progress></p>", "Level .3 of 1 unknown"),
        (
            "<p>Fee <input value=31><input hidden value=77><input style='display:none' type=checkbox checked></p>",
            "Fee 31",
        ),
        ("<body><input type=checkbox id=menu><label for=menu></label><p>Fee: 31.</p>", "Fee: 31."),
    ],
)
def test_fields_say_what_is_typed_ticked_and_chosen(html, text):
    assert read(html).text == text


def xhtml(head, body):
    return (
        '<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml">'
        f"<head>{head}</head><body><h1>Gate</h1>{body}<p>It opens at 04:10.</p></body></html>"
    )


CLOSED = (
    "title",
    "script src='a>b'",
    "style",
    "p",
    "a id='x'",
    "textarea",
    "iframe",
    "div",
    "select",
    "b",
    "noscript",
    "xmp",
)


@pytest.mark.parametrize("element", CLOSED)
def test_closed_elements_of_xhtml_take_nothing_with_them(element):
    assert read(xhtml("<title>Gate</title>", f"<{element}/>")).text == "# Gate\n\nIt opens at 04:10."


@pytest.mark.parametrize(
    "html",
    [
        xhtml("<title/>", ""),
        xhtml("<script\nsrc='k.js' />", "<br></br>"),
        xhtml("", "").replace('<?xml version="1.0"?>', "<?xml-stylesheet href='a>b'?>"),
        "<!DOCTYPE html PUBLIC '-//W3C//DTD XHTML 1.1//EN' 'x'><style/><h1>Gate</h1><p>It opens at 04:10.",
        "<!DOCTYPE html [<!ENTITY at '04:10'>]><html xmlns='http://www.w3.org/1999/xhtml'><h1>Gate</h1><p>It opens at &at;.",
        xhtml("<title/>", "")
        .replace("xmlns=", "xmlns:h=")
        .replace("</", "</h:")
        .replace("<h", "<h:h")
        .replace("<p", "<h:p"),
        xhtml("", "").replace("It opens", "<![CDATA[It opens]]>"),
    ],
)
def test_every_spelling_of_xhtml(html):
    assert read(html).text.split() == ["#", "Gate", "It", "opens", "at", "04:10."]


def test_a_script_that_holds_markup_takes_nothing_with_it():
    opening = xhtml(
        "<script type='text/javascript'>if (a < b) s.split('<![CDATA[')</script><style>/* <!-- */</style>", "<p/>"
    )
    closing = "<script>t.split(']]>')</script></body>"
    assert read(opening.replace("</body>", closing)).text == "# Gate\n\nIt opens at 04:10."
    prefixed = (
        "<h:html xmlns:h='http://www.w3.org/1999/xhtml'><h:style>p {}</h:style><h:p>It opens at 04:10.</h:p></h:html>"
    )
    assert read(prefixed).text == "It opens at 04:10."


def test_pages_are_xhtml_by_their_suffix_too():
    page = b"<html><head><title/></head><body><p>a<br></br>b</p><pre>1 <![CDATA[< 2 <b/> & 3]]></pre></body></html>"
    assert load_bytes("page.xhtml", page).documents[0].text == "a  \nb\n\n```\n1 < 2 <b/> & 3\n```"


def test_formulas_with_a_prefix_keep_their_value():
    formula = (
        '<m:math xmlns:m="http://www.w3.org/1998/Math/MathML"><m:mfrac><m:mn>1</m:mn><m:mn>2</m:mn></m:mfrac></m:math>'
    )
    assert "1/2" in read(xhtml("", f"<p>{formula}</p>")).text


HIDDEN = "<span style='display: none'><math><msup><mi>x</mi><mn>2</mn></msup></math></span>"
SHOWN = "<math><msup><mi>x</mi><mn>2</mn></msup></math>"


@pytest.mark.parametrize(
    ("html", "text"),
    [
        (
            f"<span class=mwe-math-element>{HIDDEN}<img class=mwe-math-fallback alt='{{\\displaystyle x^{{2}}}}'></span>",
            "x^{2}",
        ),
        (f"<span class=mwe-math-element>{SHOWN}<img class=mwe-math-fallback alt='x^{{2}}'></span>", "x^2"),
        ("<img class=math alt='\\frac{1}{2}'> cup, <img class=logo alt=Logo>", "\\frac{1}{2} cup,"),
        (f"<span class=katex><span class=katex-mathml>{SHOWN}</span><span class=katex-html>x2</span></span>", "x^2"),
        ("at <script type='math/tex'>x^2 < 3</script>.", "at x^2 < 3 ."),
        ("<span class=MathJax><span>x2</span></span><script type='math/tex; mode=display'>x^2</script>", "x^2"),
        ("<span class=MathJax>x drawn</span>", "x drawn"),
    ],
)
def test_a_formula_that_is_drawn_comes_once_and_as_it_was_written(html, text):
    assert read(f"<p>{html}</p>").text == text


def test_an_html_page_is_no_xhtml():
    text = read("<!doctype html><p><a href=http://orm.example/>Orm</a> <![CDATA[x]]> &lt;b/&gt; a<b/>c").text
    assert "Orm" in text
    assert "<b/>" in text

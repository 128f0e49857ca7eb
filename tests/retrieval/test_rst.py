"""reStructuredText: every directive and role keeps its text, and a word on every place that is not read."""

import docutils.core
import pytest

from blend_retrieval.loading import load_bytes

ROW = "| A | 31 |\n| --- | --- |"


def read(text):
    """The text of a file, and the reasons by place."""
    (document,), skipped = load_bytes("a.rst", text.encode())
    return document.text, {fault.source.removeprefix("a.rst").strip(): fault.reason for fault in skipped}


def read_whole(text):
    markdown, skipped = read(text)
    assert not skipped
    return markdown


def code(text):
    return f"```\n{text}\n```"


def directive(name, *options, content=""):
    """A directive with `:option: value` lines and content."""
    lines = [
        f".. {name}",
        *(f"   :{option}" for option in options),
        "",
        *(f"   {line}" for line in content.split("\n")),
    ]
    return "\n".join(lines).rstrip()


@pytest.mark.parametrize(
    ("name", "options", "content", "blocks"),
    [
        (
            "code-block:: sh",
            ["linenos:", "caption: start.sh", "emphasize-lines: 2"],
            "pump *x*\n  y",
            ["start.sh", code("pump *x*\n  y")],
        ),
        ("code-block::", ["lineno-start: x", "force:"], "pump", [code("pump")]),
        ("math::", ["label: flow", "nowrap:"], "q = \\frac{v}{4}", [code("q = \\frac{v}{4}")]),
        ("math:: q = 2", ["label: flow"], "", [code("q = 2")]),
        ("note::", ["collapsible:"], "Never dry.", ["Note", "Never dry."]),
        ("note::", ["width: odd", "Author: Ida"], "Never dry.", ["Author: Ida", "Note", "Never dry."]),
        ("table:: Fees", ["odd-one: 4"], "== ==\nA  31\n== ==", ["Odd one: 4", f"*Fees*\n\n{ROW}"]),
        ("list-table::", ["unknown:", "name: x"], "* - A\n  - 31", [ROW]),
        ("csv-table::", ["unknown: 5"], "A, 31", ["Unknown: 5", ROW]),
        (
            "figure:: /etc/hostname",
            ["alt: Fee 31", "loading: embed", "scale: 50", "odd: x"],
            "A pier.",
            ["Odd: x", "[picture: Fee 31]", "*A pier.*"],
        ),
        ("image:: a.png", ["alt: Fee 31", "zoom:", "width: wide"], "", ["[picture: Fee 31]"]),
        ("image:: a.png", ["alt: Fee 31", "target: https://orm.example"], "", ["[picture: Fee 31]"]),
        ("sidebar:: Fees", ["odd:"], "It is 31.", ["Fees", "It is 31."]),
        ("raw:: html", ["odd:"], "<p>Fee <b>31</b></p>", ["Fee **31**"]),
        ("class:: special", [], "Text.", ["Text."]),
    ],
)
def test_directives_of_docutils_with_any_option(name, options, content, blocks):
    assert read_whole(directive(name, *options, content=content)).split("\n\n", len(blocks) - 1) == blocks


@pytest.mark.parametrize(
    ("name", "options", "content", "blocks"),
    [
        ("versionadded:: 4.0", [], "", ["Added in version 4.0"]),
        ("versionadded:: 4.0 The *rate*.", [], "", ["Added in version 4.0: The *rate*."]),
        ("versionchanged:: 4.1", [], "Use B.", ["Changed in version 4.1", "Use B."]),
        ("deprecated:: 3.2\n   Use *B*.", [], "", ["Deprecated since version 3.2: Use *B*."]),
        ("versionremoved:: 5", [], "", ["Removed in version 5"]),
        ("seealso:: Pumps", [], "", ["See also: Pumps"]),
        ("todo::\n   - Oil\n   - Fuel", [], "", ["Todo", "- Oil\n\n- Fuel"]),
        ("only:: html", [], "Sub\n---\n\nText.", ["Only: html", "## Sub", "Text."]),
        (
            "py:function:: start(rate, *, dry=0)\n                 start(*a)",
            ["no-index:"],
            "It starts.",
            ["Function start(rate, *, dry=0)", "Function start(*a)", "It starts."],
        ),
        ("class:: Pump(rate)", [], "", ["Class Pump(rate)"]),
        ("class:: os.PathLike", [], "", ["Class os.PathLike"]),
        ("option:: --rate <n>, -r", [], "Litres.", ["Option --rate <n>, -r", "Litres."]),
        (
            "confval:: rate",
            ["type: int", "default: 40"],
            "Litres.",
            ["Confval rate", "Type: int", "Default: 40", "Litres."],
        ),
        (
            "toctree::",
            ["maxdepth: 2", "caption: Guide"],
            "intro\nFees <fees/2026>",
            ["Guide", "- intro\n\n- Fees (fees/2026)"],
        ),
        ("mermaid::\n   graph TD\n     A --> *B*", [], "", ["Mermaid", code("graph TD\n  A --> *B*")]),
        ("prompt:: bash $", ["odd: 3"], "ls *.py\n  x*", ["Prompt: bash $", "Odd: 3", code("ls *.py\n  x*")]),
        ("productionlist::", [], 'x: "a" | "b"', ["Productionlist", code('x: "a" | "b"')]),
        ("tab-item:: Linux", ["sync: a"], "apt *x*", ["Linux", "apt *x*"]),
        ("made-up-thing:: *a*", ["how: 7"], "* b", ["Made up thing: *a*", "How: 7", "- b"]),
        ("code-tab:: py", [], "x = *a\n  y", ["Code tab: py", code("x = *a\n  y")]),
        ("grid:: 1 2", ["gutter: 2"], "Card.", ["Card."]),
        ("py:method:: stop()", ["async:", "deprecated:"], "", ["Method stop()", "Async", "Deprecated"]),
        ("tabularcolumns:: |l|r|", [], "", [""]),
    ],
)
def test_directives_that_docutils_lacks(name, options, content, blocks):
    text = read_whole(f"Top.\n\n{directive(name, *options, content=content)}\n\nEnd.")
    assert text.removeprefix("Top.").removesuffix("End.").strip().split("\n\n", len(blocks) - 1) == blocks


@pytest.mark.parametrize(
    ("role", "text"),
    [
        (":func:`~pump.stop`", "pump.stop()"),
        (":meth:`stop(now)`", "stop(now)"),
        (":py:class:`!Pump`", "Pump"),
        (":ref:`Fees <fees>`, :ref:`fees`, :doc:`Fees<fees>`", "Fees, fees, Fees"),
        (":cpp:class:`vector<int>` :genex:`$<LINK_ONLY:x>`", "vector<int> $<LINK_ONLY:x>"),
        (":guilabel:`&Save && Go` :kbd:`Ctrl-C` :menuselection:`A --> B`", "Save & Go Ctrl-C A --> B"),
        (":issue:`12` :pep:`8` :index:`x` :abbr:`LIFO (last-in)`", "issue 12 PEP 8 x LIFO (last-in)"),
        (":download:`the file <a.zip>` `x`:made-up:", "the file x"),
        (".. default-role:: any\n\n`pump`", "pump"),
        (":math:`\\frac{1}{2}` cup", "\\frac{1}{2} cup"),
        ("10\\ :sup:`6`", "10^6^"),
    ],
)
def test_roles(role, text):
    assert read_whole(role) == text


def test_other_files_are_named_and_never_opened(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("77")
    text, skipped = read(
        f"""Fees.

.. include:: {secret}
.. include:: more.rst
   :start-line: 3
.. literalinclude:: a.py
   :caption: The code.
.. csv-table:: Summer fees
   :file: {secret}
.. raw:: html
   :url: https://orm.example/x
.. raw:: html
   :file: {secret}
.. graphviz:: flow.dot
.. autofunction:: pump.start
.. automodule:: pump
   :members:
.. raw:: latex

   \\newpage
"""
    )
    assert "77" not in text
    assert all(words in text for words in ("The code.", "Summer fees", "Autofunction: pump.start", "Automodule: pump"))
    files = f"{secret}, more.rst, a.py and 4 more"
    assert skipped == {
        files: "is another file, which is not taken in",
        "pump.start, pump": "is taken from source code by Sphinx, and not read",
        "": "holds raw latex, which is not read",
    }


WIDE = "== ====\nPier Fee\n== ====\nA  31\nNorth 12\n== ===="
SHORT = "+---+----+\n| A | 31 |\n+---+----+\n| B | 7 |\n+---+----+"
MISMATCH = "=====\nBoats\n-----"
UNEVEN = ".. list-table::\n\n   * - A\n     - 31\n   * - B"


@pytest.mark.parametrize(
    ("wrong", "line"), [(WIDE, 4), (SHORT, 6), (UNEVEN, 3), (MISMATCH, 3), (".. figure::\n\n   Fee 31", 3)]
)
def test_what_docutils_cannot_read_comes_as_it_stands(wrong, line):
    text, skipped = read(f"Fees.\n\n{wrong}\n\nPer day.")
    assert text == f"Fees.\n\n{code(wrong)}\n\nPer day."
    ((place, reason),) = skipped.items()
    lines = range(3, 3 + len(wrong.splitlines()))  # docutils names one or another
    assert place in [f"line {line}" for line in lines]
    assert reason == "cannot be read by docutils, and is taken as it stands"


def test_a_ruler_that_is_too_short_gives_one_heading():
    assert read_whole("Text.\n\nSummer fees\n-----\n\n31") == "Text.\n\n## Summer fees\n\n31"


def test_a_heading_that_stands_alone_below_the_title_is_one():
    (document,), _ = load_bytes("a.rst", b"Guide\n=====\n\nFees *now*\n----------\n\n31\n\nBoats\n~~~~~\n\n12")
    assert document.title == "Guide"
    assert document.text.split("\n\n") == ["# Guide", "## Fees *now*", "31", "### Boats", "12"]
    assert read_whole(".. sidebar:: Fees\n   :subtitle: in crowns\n\n   31") == "Fees\n\nin crowns\n\n31"


def test_headings_in_a_directive_stand_below_those_around_it():
    text = read_whole(
        "Guide\n=====\n\nFees\n----\n\n.. only:: html\n\n   Boats\n   -----\n\n   31\n\nRules\n-----\n\nNone."
    )
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == ["# Guide", "## Fees", "### Boats", "## Rules"]


@pytest.mark.parametrize(
    ("mistake", "place"),
    [
        ("note: It is 31.", "note:"),
        ("code-block::python\n\n   x = 31", "code-block::"),
        ("deprecated: 3.1", "deprecated:"),
    ],
)
def test_a_directive_that_is_mistaken_for_a_comment_is_kept(mistake, place):
    text, skipped = read(f"Fees.\n\n.. {mistake}\n\n.. Note: a comment\n\n.. todo: one, too")
    assert text.split("\n\n", 1) == ["Fees.", code(mistake.replace("   ", ""))]
    assert skipped == {
        f".. {place}": "makes a comment, not a directive: that has two colons and a blank behind its name"
    }


def test_a_row_whose_first_cell_is_blank_is_kept():
    table = "======= ==== ====\n\\        Min  Max\n======= ==== ====\nlength  4.3  7.9\n======= ==== ====".replace(
        "\\", " "
    )
    assert read_whole(table) == "|  | Min | Max |\n| --- | --- | --- |\n| length | 4.3 | 7.9 |"


def test_numbers_kinds_headers_and_days():
    text = read_whole(
        ".. header:: Draft 7\n\nb) first\nc) second\n\nText.\n\n9. ninth\n#. tenth\n\nrate : int\n   Litres.\n\n"
        ".. |day| date::\n\nBuilt |day| as |version|."
    )
    assert text.split("\n\n") == [
        *("Draft 7", "b. first", "c. second", "Text.", "9. ninth", "10. tenth", "rate : int", "Litres."),
        "Built [date] as |version|.",
    ]


def test_long_lines_and_files_that_break_the_parser(monkeypatch):
    assert read_whole(f"A {'b' * 20_000} 31").endswith(" 31")
    monkeypatch.setattr(docutils.core, "publish_parts", lambda *_, **__: 1 / 0)
    text, skipped = read("Fee: 31\n=======")
    assert text == "Fee: 31\n======="
    assert skipped == {"": "is read as plain text: docutils cannot read it (ZeroDivisionError)"}

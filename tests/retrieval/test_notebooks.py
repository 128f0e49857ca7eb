"""Jupyter notebooks."""

import json

import pytest

from blend_retrieval.loading import load_bytes


def notebook(*cells, **more):
    language = {"metadata": {"kernelspec": {"language": "python"}}}
    return json.dumps({"cells": cells, "nbformat": 4, **language, **more}).encode()


def code(source, *outputs):
    return {"cell_type": "code", "source": source, "outputs": list(outputs)}


def shown(**data):
    return {"output_type": "display_data", "data": {name.replace("_", "/", 1): value for name, value in data.items()}}


def read(data):
    (document,), skipped = load_bytes("a.ipynb", data)
    return document, [(entry.source, entry.reason) for entry in skipped]


def test_cells_in_their_order_with_outputs_that_are_text():
    stream = {"output_type": "stream", "text": ["10%\r20%\r", "done\n", "\x1b[31mred\x1b[0m\n"]}
    error = {
        "output_type": "error",
        "ename": "KeyError",
        "evalue": "'fee'",
        "traceback": ["\x1b[0;31mKeyError\x1b[0m: 'fee'"],
    }
    table = "<table><tr><th>Pier</th><th>Fee</th></tr><tr><td>A</td><td>31</td></tr></table>"
    cells = [
        {"cell_type": "markdown", "source": ["# Fees\n", "All fees."]},
        code(["print(1)\n", "x"], stream, shown(text_plain="   fee\n0  31", text_html=table)),
        code("y = '```'", error, shown(text_plain=["1.50"])),
        code("z", shown(text_markdown="**12**", text_plain="<M>"), shown(text_latex="$x^2$")),
        {"cell_type": "raw", "source": "As it is."},
    ]
    document, reasons = read(notebook(*cells))
    assert (document.title, document.markup, reasons) == ("Fees", "markdown", [])
    assert document.text.split("\n\n") == [
        "# Fees\nAll fees.",
        "```python\nprint(1)\nx\n```",
        "```\ndone\nred\n```",
        "| Pier | Fee |\n| --- | --- |\n| A | 31 |",
        "````python\ny = '```'\n````",
        "```\nKeyError: 'fee'\n```",
        "```\n1.50\n```",
        "```python\nz\n```",
        "**12**",
        "$x^2$",
        "As it is.",
    ]


def test_pictures_and_widgets_are_named():
    figure = shown(image_png="AAAA", text_plain="<Figure size 640x480 with 1 Axes>")
    widget = {"output_type": "display_data", "data": {"application/x-widget": {}}}
    picture = {"cell_type": "markdown", "source": "See ![the pier](attachment:p.png)."}
    document, reasons = read(notebook(picture, code("plot()", figure), code("w", widget)))
    assert document.text == "See the pier.\n\n```python\nplot()\n```\n\n```python\nw\n```"
    assert reasons == [
        ("a.ipynb cell 1", "holds a picture, which is not read"),
        ("a.ipynb cell 2", "shows a picture, which is not read"),
        ("a.ipynb cell 3", "shows application/x-widget, which is not read"),
    ]


def test_notebooks_before_version_4():
    cells = [
        {"cell_type": "heading", "level": 2, "source": "Fees"},
        {
            "cell_type": "code",
            "language": "python",
            "input": "x",
            "outputs": [{"output_type": "pyout", "text": ["31"]}],
        },
    ]
    document, _ = read(json.dumps({"worksheets": [{"cells": cells}], "nbformat": 3}).encode())
    assert document.text == "## Fees\n\n```python\nx\n```\n\n```\n31\n```"


@pytest.mark.parametrize(
    ("data", "reason"), [(b"{", "is no notebook: it is not JSON"), (b'{"a": 1}', "is no notebook: it has no cells")]
)
def test_what_is_no_notebook(data, reason):
    _, (skipped,) = load_bytes("a.ipynb", data)
    assert skipped.reason == reason

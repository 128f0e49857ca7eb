"""Mails, tables, captions and notebooks that attack their reader: the text that they hold stays, and the work is bounded."""

import io
import json

import pytest

from blend_retrieval.loading import load_bytes

_CUE = "00:00:01.000 --> 00:00:02.000\n"


def texts_of(name, data):
    return [document.text for document in load_bytes(name, data).documents]


def reasons_of(name, data):
    return [skipped.reason for skipped in load_bytes(name, data).skipped]


def mail(*headers, body="hello"):
    return "\n".join(["From: a@example.org", *headers, "", body]).encode()


def multipart(*parts):
    body = "".join(f"--b\n{part}\n" for part in parts)
    return mail("Content-Type: multipart/mixed; boundary=b", body=f"{body}--b--")


def notebook(*cells):
    return json.dumps({"cells": cells}).encode()


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


KEPT = {
    "a nested cell in no row": (rb"{\rtf1 \intbl\itap999999999 alpha\nestcell}", "alpha"),
    "a row that does not end": (rb"{\rtf1 \trowd\intbl alpha\cell omega\cell}", "| alpha | omega |"),
    "paragraphs of a table in no cell": (rb"{\rtf1 \intbl alpha\par omega\par}", "omega"),
    "cells before a paragraph": (rb"{\rtf1 \intbl alpha\cell\pard omega\par}", "alpha"),
    "a paragraph of a table behind its rows": (rb"{\rtf1 \trowd\intbl alpha\cell\row omega\par}", "omega"),
    "a substitute that goes beyond its group": (rb"{\rtf1 {\uc9\u65 ?}omega}", "Aomega"),
    "a substitute of 999,999,999 bytes": (rb"{\rtf1 \uc999999999\u65 " + b"?" * 16 + b"omega}", "Aomega"),
}


@pytest.mark.parametrize(("data", "text"), KEPT.values(), ids=KEPT)
def test_broken_rich_text_keeps_its_words(data, text):
    (document,) = texts_of("a.rtf", data)

    assert text in document


def test_a_row_that_the_file_leaves_open_reads_as_one_that_ends():
    ended = rb"{\rtf1 \trowd\intbl alpha\cell omega\cell\row}"
    left_open = rb"{\rtf1 \trowd\intbl alpha\cell omega}"

    assert texts_of("a.rtf", left_open) == texts_of("a.rtf", ended)


@pytest.mark.parametrize("charset", ["punycode", "undefined", "idna", "unicode_escape", "zlib", "no-such"])
def test_a_charset_that_is_none_costs_no_text(charset):
    data = mail(f"Content-Type: text/plain; charset={charset}", body=r"C:\new xn--a-b")

    assert texts_of("a.eml", data) == ["From: a@example.org\n\nC:\\new xn--a-b"]
    assert reasons_of("a.eml", data) == []


def test_a_mail_of_too_many_parts_is_refused_with_its_remedy():
    data = multipart(*["\na"] * 20_001)

    assert reasons_of("a.eml", data) == ["has more than 20,000 parts: divide it"]


def test_a_kind_that_many_parts_repeat_is_parsed_once(cpu_seconds):
    typed = f"Content-Type: text/plain; {'a=b; ' * 50}\n\na"
    once, often = multipart(typed), multipart(*[typed] * 100)

    assert cpu_seconds(lambda: texts_of("a.eml", often)) < 20 * cpu_seconds(lambda: texts_of("a.eml", once))


def test_parts_whose_kinds_are_all_long_are_refused_with_their_remedy():
    kinds = [f"Content-Type: text/plain; name={number}{'a' * 1950}\n\na" for number in range(220)]

    assert reasons_of("a.eml", multipart(*kinds[:100])) == []
    assert reasons_of("a.eml", multipart(*kinds)) == [
        "has more than 400,000 characters in the headers of its parts: divide it"
    ]


@pytest.fixture
def cpu_seconds():
    """The processor time of a call: the least of three."""
    from time import process_time

    def measure(call):
        times = []
        for _ in range(3):
            start = process_time()
            call()
            times.append(process_time() - start)
        return min(times)

    return measure


def encoded_words(count):
    return mail(f"Subject: {'=?utf-8?b?YQ==?= ' * count}")


def test_a_long_subject_of_encoded_words_is_read_whole_in_linear_time(cpu_seconds):
    (document,) = load_bytes("a.eml", encoded_words(24_000)).documents
    assert document.title == "a" * 24_000

    ratio = cpu_seconds(lambda: load_bytes("a.eml", encoded_words(24_000))) / cpu_seconds(
        lambda: load_bytes("a.eml", encoded_words(6000))
    )
    assert ratio < 8


def test_words_of_a_long_header_stay_apart():
    (document,) = load_bytes("a.eml", mail(f"Subject: {'plain ' * 4000}=?utf-8?q?end?= last")).documents

    assert document.title == f"{'plain ' * 4000}end last"


@pytest.mark.parametrize("name", ["a.vtt", "a.srt"])
def test_a_time_of_4000_digits_leaves_the_other_cues(name):
    data = f"WEBVTT\n\n{_CUE}alpha\n\n{'9' * 4000}:00:00.000 --> 00:00:03.000\nbeta\n\n{_CUE}omega".encode()

    (document,) = texts_of(name, data)
    assert "alpha" in document
    assert "omega" in document


def test_front_matter_that_names_itself_over_and_over_gives_no_title(cpu_seconds):
    lists = "".join(f"b{level}: &b{level} [{', '.join([f'*b{level - 1}'] * 9)}]\n" for level in range(1, 6))
    data = f"---\nb0: &b0 [x]\n{lists}title: *b5\n---\nhello".encode()

    (document,) = load_bytes("a.md", data).documents
    assert document.title == "a"
    assert document.text == "hello"


def test_deep_json_in_a_notebook_does_not_swell():
    output = {"output_type": "display_data", "data": {"application/json": nested(400)}}
    data = notebook({"cell_type": "code", "source": "a", "outputs": [output]})

    (document,) = texts_of("a.ipynb", data)
    assert len(document) < 2 * len(data)


def test_flat_json_in_a_notebook_stands_in_lines():
    output = {"output_type": "display_data", "data": {"application/json": {"a": [1]}}}
    data = notebook({"cell_type": "code", "source": "", "outputs": [output]})

    assert texts_of("a.ipynb", data) == ['```json\n{\n "a": [\n  1\n ]\n}\n```']


def test_pictures_in_many_cells_take_linear_time(cpu_seconds):
    cell = {"cell_type": "markdown", "source": "![a](data:x)"}
    few, many = notebook(*[cell] * 2000), notebook(*[cell] * 8000)

    ratio = cpu_seconds(lambda: texts_of("a.ipynb", many)) / cpu_seconds(lambda: texts_of("a.ipynb", few))
    assert ratio < 8


def test_a_line_of_a_calendar_with_broken_parameters_keeps_its_text():
    data = b'BEGIN:VCALENDAR\nBEGIN:VEVENT\nSUMMARY:alpha\nDESCRIPTION;A="b:omega\nEND:VEVENT\nEND:VCALENDAR'

    assert texts_of("a.ics", data) == ["Summary: alpha\nDescription: omega"]


def test_a_column_that_repeats_a_long_text_is_refused():
    from arro3.core import Array, DataType, Table
    from arro3.io import write_parquet

    data = io.BytesIO()
    column = Array(["y" * 10_000] * 6500, DataType.string())
    write_parquet(Table.from_arrays([column], names=["text"]), data)

    (reason,) = reasons_of("a.parquet", data.getvalue())
    assert reason == "unpacks to far more text than a file of its size holds: divide it"


HELD = {
    "a CSV of one line": ("a.csv", b"a" * 3_000_000),
    "a CSV of 100,000 columns": ("a.csv", b"a," * 100_000),
    "a quotation mark that never closes": ("a.csv", b'a,b\n"' + b"x,y\n" * 20_000),
    "a quotation mark in each line": ("a.csv", b"a,b\n" + b'"x,y\n' * 5000),
    "a calendar of dates": ("a.ics", b"BEGIN:VCALENDAR\nBEGIN:VEVENT\n" + b"EXDATE:20261103T090000Z\n" * 20_000),
    "tags that never end": ("a.vtt", f"WEBVTT\n\n{_CUE}{'<v ' * 50_000}".encode()),
    "kinds of 20,000 parameters": ("a.eml", mail("Content-Type: text/plain" + "; a=b" * 20_000)),
    "20,000 headers": ("a.eml", mail(*["X-A: b"] * 20_000)),
}


@pytest.mark.parametrize(("name", "data"), HELD.values(), ids=HELD)
def test_floods_are_read_in_little_time(name, data, cpu_seconds):
    assert texts_of(name, data)
    assert cpu_seconds(lambda: load_bytes(name, data)) < 3


@pytest.mark.parametrize(
    ("name", "head", "reason"),
    [("a.ipynb", b'{"cells":', "is no notebook: it is not JSON"), ("a.jsonl", b'{"text":', "is not JSON")],
)
def test_json_that_is_nested_100000_deep_is_named(name, head, reason):
    data = head + b"[" * 100_000 + b"]" * 100_000 + b"}"

    assert reasons_of(name, data) == [reason]

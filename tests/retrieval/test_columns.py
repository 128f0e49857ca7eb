"""Parquet and Feather: the values of each type, and rows that are documents."""

import io

import pytest
from arro3.core import Array, DataType, Field, Table, list_array, struct_array
from arro3.io import write_ipc, write_parquet
from sheet_files import grid

from blend_retrieval.loading import load_bytes


def stored(columns, kind="parquet"):
    table = Table.from_pydict(columns)
    data = io.BytesIO()
    write = write_parquet if kind == "parquet" else write_ipc
    write(table, data)
    return data.getvalue()


COLUMNS = {
    "int": (Array([2**60, None], DataType.int64()), str(2**60)),
    "big": (Array([2**63 + 1, None], DataType.uint64()), str(2**63 + 1)),
    "single": (Array([0.1, None], DataType.float32()), "0.1"),
    "double": (Array([0.1, None], DataType.float64()), "0.1"),
    "money": (Array(["1.50", None], DataType.string()).cast(DataType.decimal128(10, 2)), "1.50"),
    "when": (
        Array([1588516200123456789, None], DataType.int64()).cast(DataType.timestamp("ns")),
        "2020-05-03T14:30:00.123456789",
    ),
    "day": (Array(["2020-05-03", None], DataType.string()).cast(DataType.date32()), "2020-05-03"),
    "word": (Array(["a|b", None], DataType.string()), r"a\|b"),
    "flag": (Array([False, None], DataType.bool()), "false"),
}


@pytest.mark.parametrize("kind", ["parquet", "feather", "arrow"])
def test_each_value_is_shown_as_it_is(kind):
    columns = {name: values for name, (values, _) in COLUMNS.items()}
    (document,), skipped = load_bytes(f"a.{kind}", stored(columns, kind))
    assert not skipped
    assert grid(document.text) == [list(COLUMNS), [right for _, right in COLUMNS.values()]]


def test_lists_and_records_in_cells():
    numbers = Array([1, 2], DataType.int64())
    offsets = Array([0, 2], DataType.int32())
    columns = {
        "single": list_array(offsets, Array([0.1, 2.5], DataType.float32())),
        "words": list_array(offsets, Array(["a, b", "é"], DataType.string())),
        "record": struct_array([numbers], fields=[Field("fee", DataType.int64())]).slice(1, 1),
    }
    (document,), _ = load_bytes("a.parquet", stored(columns))
    assert grid(document.text)[1] == ["[0.1, 2.5]", '["a, b", "é"]', '{"fee": 2}']


def test_what_is_no_text_is_named():
    columns = {
        "name": Array(["Orm"], DataType.string()),
        "scan": Array([b"\xff\0"], DataType.binary()),
        "late": Array([10**18], DataType.int64()).cast(DataType.timestamp("ms")),
    }
    (document,), skipped = load_bytes("a.parquet", stored(columns))
    assert grid(document.text)[1] == ["Orm", "", ""]
    assert {entry.source: entry.reason for entry in skipped} == {
        "a.parquet column scan": "holds bytes, which are not read",
        "a.parquet column late": "holds a value that cannot be written as text",
    }


def test_rows_of_title_and_text_are_documents():
    texts = {
        "id": Array(["a", "b"], DataType.string()),
        "title": Array(["Orm", "Kell"], DataType.string()),
        "body": Array(["# One\nline", "Two"], DataType.string()),
    }
    documents, _ = load_bytes("a.parquet", stored(texts), "body")
    assert [(document.id, document.title, document.text) for document in documents] == [
        ("a.parquet#a", "Orm", "# One\nline"),
        ("a.parquet#b", "Kell", "Two"),
    ]
    (document,), _ = load_bytes("a.parquet", stored(texts))  # no column is called "text"
    assert grid(document.text)[0] == ["id", "title", "body"]
    (document,), _ = load_bytes("a.parquet", stored({**texts, "fee": Array([1, 2], DataType.int64())}), "body")
    assert grid(document.text)[1] == ["a", "Orm", "# One line", "1"]


def test_damaged_files_are_named():
    data = stored({"fee": Array([31], DataType.int64())})
    cases = {
        "a.parquet": {
            data[:-9]: "is damaged: it does not begin and end as Parquet does",
            data[:-8] + b"\xff" * 4 + b"PAR1": "is damaged",
            data[:-4] + b"PARE": "is encrypted",
        },
        "a.feather": {
            b"FEA1 old FEA1": "is in the first version of Feather: save it in the second",
            data: "is damaged: it does not begin and end as Feather does",
        },
    }
    for name, reasons in cases.items():
        for content, reason in reasons.items():
            documents, (skipped,) = load_bytes(name, content)
            assert not documents
            assert skipped.reason == reason


def test_a_table_is_read_up_to_a_limit(monkeypatch):
    monkeypatch.setattr("blend_retrieval.readers.sheets.columns.MOST_CELLS", 6)
    numbers = Array(list(range(9)), DataType.int64())
    (document,), (skipped,) = load_bytes("a.parquet", stored({"a": numbers, "b": numbers}))
    assert grid(document.text)[1:] == [["0", "0"], ["1", "1"], ["2", "2"]]
    assert (skipped.source, skipped.reason) == ("a.parquet after row 3", "has more than the 6 cells that are read")

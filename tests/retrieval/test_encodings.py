"""Text files in every encoding that is certain; what is not certain is refused."""

import compileall
import random
import sqlite3
import sys
from array import array
from pathlib import Path

import pytest

from blend_retrieval.decoding import DecodingError, decode
from blend_retrieval.loading import load_bytes

GERMAN = "Der Müller zahlt 31 Kronen, größere Boote zahlen mehr."
RUSSIAN = "Причал открыт с 6 до 20, плата 30 крон."
JAPANESE = "桟橋は朝六時から開いています。料金は三十クローネです。"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.rst", "a.html", "a.jsonl"])
def test_unicode_needs_no_note(name, encoding):
    text = f'{{"text": "{GERMAN}"}}' if name == "a.jsonl" else GERMAN
    (document,), skipped = load_bytes(name, text.encode(encoding))
    assert (document.text, skipped) == (GERMAN, ())


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (GERMAN, "latin-1"),
        ("The fee is “thirty” crowns – it’s cheap.", "windows-1252"),
        ("Opłata wynosi 30 koron, większe statki płacą więcej.", "iso-8859-2"),
        (RUSSIAN, "koi8-r"),
        (RUSSIAN, "windows-1251"),
        (JAPANESE, "shift_jis"),
        (JAPANESE, "euc-jp"),
        ("码头早上六点开放，费用为三十克朗。", "gb2312"),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.rst", "a.html", "a.jsonl"])
def test_other_encodings_are_read_with_a_note(name, text, encoding):
    data = (f'{{"text": "{text}"}}' if name == "a.jsonl" else text).encode(encoding)
    (document,), (note,) = load_bytes(name, data)
    assert document.text == text
    assert note.source == name
    assert note.reason.startswith("is read as ")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (bytes(range(1, 32)) * 20, "binary"),
        (b"ok \x81\x8d\xff\xfe and more of it", "not certain"),
        (b"caf\xe9", "not certain"),
        ((GERMAN * 20).encode() + b"\xe4", "damaged UTF-8"),
        (b"\xff\xfea", "damaged"),
    ],
)
def test_what_is_not_certain_is_refused(data, reason):
    with pytest.raises(DecodingError, match=reason):
        decode(data)


UNMARKED = {
    "English": "The fee is “thirty” crowns – it’s cheap.",
    "German": GERMAN,
    "Polish": "Opłata wynosi 30 koron, większe statki płacą więcej.",
    "Vietnamese": "Bến tàu mở cửa lúc sáu giờ, phí là ba mươi curon.",
    "Russian": RUSSIAN,
    "Greek": "Η προβλήτα ανοίγει στις έξι και το τέλος είναι τριάντα κορώνες.",
    "Arabic": "يفتح الرصيف في السادسة والرسوم ثلاثون كرونة.",
    "Hindi": "घाट सुबह छह बजे खुलता है और शुल्क तीस क्रोनर है।",
    "Thai": "ท่าเรือเปิดเวลาหกโมงเช้า ค่าธรรมเนียมสามสิบโครน เรือใหญ่จ่ายมากกว่า",
    "Korean": "부두는 아침 여섯 시에 열리고 요금은 서른 크로네입니다.",
    "Japanese": JAPANESE,
    "Japanese lines": JAPANESE.replace("。", "。\n"),
    "Chinese": "码头早上六点开放，费用为三十克朗。",
    "short": "Fee: 31.",
}


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("text", UNMARKED.values(), ids=UNMARKED)
def test_unicode_without_a_byte_order_mark_is_read_with_a_note(text, encoding):
    decoded = decode(text.encode(encoding))
    assert decoded == (text, f"is read as {encoding}: it has no byte order mark")


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.rst", "a.html", "a.jsonl"])
def test_every_kind_of_text_file_may_lack_its_byte_order_mark(name):
    text = f'{{"text": "{RUSSIAN}"}}' if name == "a.jsonl" else RUSSIAN
    (document,), (note,) = load_bytes(name, text.encode("utf-16-le"))
    assert (document.text, note.lost) == (RUSSIAN, 0)
    assert note.reason == "is read as utf-16-le: it has no byte order mark"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("text", [*UNMARKED.values(), "Fee", "мол", "桟橋は"])
def test_a_beginning_of_any_length_is_read_right_or_refused(text, encoding):
    for length in range(2, len(text)):
        data = text[:length].encode(encoding)
        if b"\0" in data:
            try:
                decoded = decode(data)
            except DecodingError:
                continue
            assert decoded.text == text[:length]


def binary_files(folder):
    """Files of machines: whole ones, and their beginnings and middles."""
    database = sqlite3.connect(folder / "a.db")
    with database:
        database.execute("create table piers (name text, fee int)")
        database.executemany("insert into piers values (?, ?)", [(f"Pier {n}", n) for n in range(500)])
    database.close()
    source = folder / "a.py"
    source.write_text("\n".join(f"def pier_{n}(fee, crowns={n}):\n    return fee * {n}" for n in range(50)))
    compileall.compile_file(source, quiet=1)
    (compiled,) = folder.rglob("*.pyc")
    picture = Path(__file__).parents[2] / "docs" / "selection.png"
    program = Path(sys.executable).resolve()
    seeded = random.Random(1)
    sounds = array("h", (seeded.randrange(-3000, 3000) for _ in range(5000)))
    names = b"\0".join(b"docs/page-%d.md" % n for n in range(40))
    cut_text = b"An ordinary text with a fault\0 somewhere, and more of it behind that. "
    whole = [path.read_bytes()[: 1 << 20] for path in (folder / "a.db", compiled, picture, program)]
    return [*whole, sounds.tobytes(), array("I", range(3000)).tobytes(), names, cut_text, cut_text * 20]


def test_binary_files_are_no_text_in_utf_16(tmp_path):
    for data in binary_files(tmp_path):
        for part in (data, data[:1000], data[len(data) // 2 :][:1000]):
            if b"\0" in part:
                with pytest.raises(DecodingError, match="is a binary file"):
                    decode(part)


NO_TEXT = {
    "compiled Python": "Zd\u0184Z\u0102Gd\u0284".encode("utf-16-be") * 2,
    "letters of many scripts": "\u0560\u5fb0\uc3f8\u6427\t\u5afe\t\u1330\u0d05\ud3f5".encode("utf-16-be"),
    "a blank by chance": "\u130f\u5397\ub045\u2a16\u6bf3\ub0e4\u30b1/\u5c36".encode("utf-16-le"),
    "words that end with a NUL": b" \0".join([b"harbours", b"fees", b"crowns", b"timber"] * 9),
    "text in both orders": ("\u4e8f\u4e90 \u2000" * 6).encode("utf-16-be"),
}


@pytest.mark.parametrize("data", NO_TEXT.values(), ids=NO_TEXT)
def test_bytes_that_resemble_utf_16_are_refused(data):
    with pytest.raises(DecodingError, match="is a binary file"):
        decode(data)


def test_bytes_without_a_nul_are_in_utf_16_only_if_all_of_it_is_of_east_asia():
    thai = UNMARKED["Thai"].replace(" ", "").encode("gb18030")
    with pytest.raises(DecodingError, match="its encoding is not certain"):
        decode(thai)
    kanji = JAPANESE.encode("utf-16-be")
    assert b"\0" not in kanji
    assert decode(kanji).text == JAPANESE


def test_a_declared_encoding_that_does_not_fit_is_not_believed():
    assert decode(RUSSIAN.encode(), declared="ascii").text == RUSSIAN
    assert decode(RUSSIAN.encode(), declared="no-such-encoding").text == RUSSIAN
    assert decode("“a”".encode("windows-1252"), declared="iso-8859-1").text == "“a”"


@pytest.mark.parametrize(
    ("top", "title", "text"),
    [
        ("---\ntitle: 'A title'\ntags: x\n---\n\nText.\n", "A title", "Text."),
        ("---\ntitle: >-\n  Pump manual\n  for depots\n---\nText.\n", "Pump manual for depots", "Text."),
        ("---\ntags: [x]\n...\n# Pump *manual*\n\nText.\n", "Pump *manual*", "# Pump *manual*\n\nText."),
        ("Text.\n\n# Late heading\n", "a", "Text.\n\n# Late heading"),
    ],
    ids=["front matter", "folded", "first heading", "file"],
)
def test_front_matter_or_the_first_heading_or_the_file_names_a_document(top, title, text):
    ((document,), _) = load_bytes("a.md", top.encode())
    assert (document.title, document.text) == (title, text)


@pytest.mark.parametrize(
    "text",
    [
        "\n**Warning:** never open valve B.\n",
        "Never open valve B.",
        "- Never open valve B.",
        "\nWarning: never open valve B.\n",
        "valve: [B",
        "Warning: never open valve B.",
    ],
)
def test_text_between_two_rules_is_no_front_matter(text):
    page = f"---\n{text}\n---\n\n# Manual"
    ((document,), _) = load_bytes("a.md", page.encode())
    assert document.text == page

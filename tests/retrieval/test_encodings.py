"""Text files in every encoding that is certain; what is not certain is refused."""

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
        (GERMAN.encode("utf-16-le"), "binary"),  # without a byte order mark
        (b"ok \x81\x8d\xff\xfe and more of it", "not certain"),
        (b"caf\xe9", "not certain"),
        ((GERMAN * 20).encode() + b"\xe4", "damaged UTF-8"),
        (b"\xff\xfea", "damaged"),
    ],
)
def test_what_is_not_certain_is_refused(data, reason):
    with pytest.raises(DecodingError, match=reason):
        decode(data)


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

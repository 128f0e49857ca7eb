"""Words are equal however they were typed, and differ where readers see a difference."""

import json
from unicodedata import normalize

import numpy as np
import pytest
from rendered import chunks

from blend_retrieval.chunking import Chunk
from blend_retrieval.errors import QueryError
from blend_retrieval.generations import MANIFEST
from blend_retrieval.index import ChunkIndex, passage_text, update_index
from blend_retrieval.lexical import LexicalIndex, words
from blend_retrieval.retriever import Retriever

DIVIDED = {
    "ASCII": (
        "The valve AB-1234-C opens at 7:30, ERR_BUSY_12.",
        ["the", "valve", "ab", "1234", "c", "opens", "at", "7", "30", "err_busy_12"],
    ),
    "signs alone": (" \n…—", []),
    "Japanese": ("漢字とカナー", ["漢", "字", "と", "カ", "ナ", "ー"]),
    "Hindi": ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
    "Tamil": ("தமிழ் மொழி", ["தமிழ்", "மொழி"]),
    "Thai, a letter with its marks": ("น้ำ", ["น้ํ", "า"]),
    "Khmer": ("ភាសា", ["ភា", "សា"]),
    "Arabic with a number": ("المادة ٢٠٢٣، الفقرة", ["الماده", "2023", "الفقره"]),
    "apostrophes of all kinds": ("don't don’t donʼt", ["don", "t"] * 3),
    "a power": ("10⁶ 10^6", ["10", "6", "10", "6"]),
    "a note's number": ("Acme¹ m² CO₂", ["acme", "1", "m2", "co2"]),
    "signs that hold letters or figures": ("Acme™ step① 5½ 5㎏", ["acme", "tm", "step", "1", "5", "1", "2", "5", "kg"]),
}


@pytest.mark.parametrize("case", DIVIDED)
def test_a_text_is_divided_into_words(case):
    text, expected = DIVIDED[case]
    assert words(text) == expected
    assert words(normalize("NFD", text)) == expected


TYPED_ALIKE = {
    "letters with marks in two characters": (normalize("NFD", "Ångström"), "Ångström"),
    "Korean syllables in letters": (normalize("NFD", "회의록"), "회의록"),
    "wide letters": ("ＡＢ－１２３４", "ab-1234"),
    "half-width kana": ("ｶﾞｽ", "ガス"),
    "ligatures": ("ﬁnal oﬃce", "final office"),
    "letters of formulas": ("𝐀𝐁", "ab"),
    "a zero-width space": ("pass\u200bword", "password"),
    "a soft hyphen": ("re\u00adplace\u00ad\nment", "replacement"),
    "a byte order mark, a word joiner, a mark of direction": ("\ufeffpass\u2060wo\u200erd", "password"),
    "a sign for the form of an emoji": ("ab\ufe0f", "ab"),
    "a joiner that shapes Persian letters": ("می\u200cخواهم", "میخواهم"),
    "Malayalam letters of older texts": ("ഞാന\u0d4d\u200d", "ഞാൻ"),
    "Arabic vowels and stretched letters": ("كِتَاب", "كتـــاب"),
    "Arabic alef, Persian kaf and yeh": ("أحمد کتابی", "احمد كتابي"),
    "Arabic letters in their shapes": ("ﻛﺘﺎب", "كتاب"),
    "Hebrew points": ("שָׁלוֹם", "שלום"),
    "digits of Arabic, Persian and Hindi": ("٢٠٢٣ ۲۰۲۳ २०२३", "2023 2023 2023"),
    "Russian stress, and yo": ("Москва\u0301 Королёв", "москва Королев"),
    "Greek accents, which capitals lack, and the last sigma": ("Αθήνα λόγος", "ΑΘΗΝΑ ΛΟΓΟΣ"),
    "Turkish i": ("DİYARBAKIR", "Diyarbakır"),
    "the French ligature": ("cœur", "COEUR"),
    "letters that are crossed out or underlined": ("s\u0336o\u0336l\u0336d\u0336 u\u0332p\u0332", "sold up"),
    "sharp s": ("STRASSE", "straße"),
}


@pytest.mark.parametrize("case", TYPED_ALIKE)
def test_what_is_typed_in_two_ways_is_found(case):
    text, question = TYPED_ALIKE[case]
    assert words(text) == words(question) != []
    coverage = LexicalIndex([f"Ask {text} first.", "The gate opens at noon."]).coverage(question)
    assert coverage[0] > 0.3 > coverage[1] == 0


@pytest.mark.parametrize(
    ("left", "right"),
    [
        *(("schön", "schon"), ("pêche", "péché"), ("año", "ano"), ("Nguyễn", "Nguyen")),
        *(("か", "が"), ("кот", "йод"), ("мои", "мой"), ("कल", "काल"), ("कला", "कल"), ("กา", "ก้า"), ("ދ", "ދި")),
        *(("10⁶", "106"), ("5½", "51"), ("2³", "23"), ("ab", "a b"), ("re-cover", "recover")),
    ],
)
def test_what_readers_keep_apart_stays_apart(left, right):
    assert words(left) != words(right)
    assert words(normalize("NFD", left)) == words(left)


def test_an_embedder_reads_texts_in_one_form():
    typed = Chunk("1", "a.md", "Cafe\u0301", "Part ＡＢ-１, 10⁶ pass\u200bwords, 5½, ﬁne: schön", 9)
    assert passage_text(typed) == "Café\nPart AB-1, 10 6 passwords, 5 1⁄2, fine: schön"


def test_questions_are_embedded_in_the_form_of_the_passages(bag):
    corpus = chunks("part AB1", "part XY9")
    retriever = Retriever(ChunkIndex(corpus, bag.embed([passage_text(chunk) for chunk in corpus]), bag.name), bag)
    bag.embedded.clear()
    retriever.search("ｐａｒｔ ＡＢ１\u200b", 1, before=["ﬁrst", "\u200b"])
    assert bag.embedded == ["part AB1", "first"]


def test_a_question_of_unseen_signs_is_refused(bag):
    corpus = chunks("part")
    retriever = Retriever(ChunkIndex(corpus, bag.embed(["part"]), bag.name), bag)
    with pytest.raises(QueryError, match="empty"):
        retriever.search("\u200b \u00ad", 1, before=["part"])


def forget_the_form(directory):
    """Make the manifest that of a version that embedded texts as they were typed."""
    manifest = json.loads((directory / MANIFEST).read_text())
    assert manifest.pop("form") == 2
    (directory / MANIFEST).write_text(json.dumps(manifest))


def test_an_index_of_texts_as_they_were_typed_embeds_them_anew(tmp_path, bag):
    corpus = chunks("plain", "ｗｉｄｅ", "schön")
    update_index(tmp_path, corpus, bag)
    forget_the_form(tmp_path)
    assert len(ChunkIndex.load(tmp_path, bag)) == 3  # a server goes on with it
    bag.embedded.clear()
    update = update_index(tmp_path, corpus, bag)
    assert update == (0, 3, 0, "1 of 3 chunks were embedded as they were typed, by an earlier version")
    assert bag.embedded == ["Title\nwide"]
    expected = bag.embed(["Title\nplain", "Title\nwide", "Title\nschön"])
    np.testing.assert_array_equal(ChunkIndex.load(tmp_path).vectors(), expected)
    assert update_index(tmp_path, corpus, bag) == (0, 3, 0, "")


def test_an_index_without_such_texts_is_kept_without_a_word(tmp_path, bag):
    corpus = chunks("plain")
    update_index(tmp_path, corpus, bag)
    forget_the_form(tmp_path)
    bag.embedded.clear()
    assert update_index(tmp_path, corpus, bag) == (0, 1, 0, "")
    assert bag.embedded == []
    assert json.loads((tmp_path / MANIFEST).read_text())["form"] == 2

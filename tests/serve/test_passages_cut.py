"""New text is cut by its own content: a passage gives the same pieces whatever stands around it."""

import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from blend.serve.prompts.cutter import MOST_PIECE, REACH, Cutter
from blend.serve.token_index import LEAST_PIECE, Ids

DOCS = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
NEAR = REACH + 8  # the hash of a boundary looks at a few tokens more


@cache
def tokenizer() -> Tokenizer:
    """Its newlines may join the punctuation before them, as with Qwen."""
    core = Tokenizer(BPE())
    words = pre_tokenizers.Split(Regex(r" ?\w+| ?[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+"), "isolated")
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([words, spelled])
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=1500, special_tokens=["<|im_end|>"], initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator([path.read_text() for path in DOCS], trainer)
    return core


@cache
def cutter() -> Cutter:
    return Cutter(tokenizer(), frozenset([tokenizer().token_to_id("<|im_end|>")]))


def encoded(text: str) -> Ids:
    return np.array(tokenizer().encode(text).ids, np.int32)


@cache
def document(number: int) -> Ids:
    """One of the longest of our own documents."""
    return encoded(sorted((path.read_text() for path in DOCS), key=len)[-1 - number])


def cuts(ids: Ids) -> list[int]:
    """Where pieces meet. They cover the text in order, and none is too long."""
    pieces = cutter().pieces(ids)
    assert [0, *(one.stop for one in pieces)] == [*(one.start for one in pieces), len(ids)]
    assert all(0 < one.length <= MOST_PIECE for one in pieces)
    return [one.start for one in pieces[1:]]


@pytest.mark.parametrize(("least_rows", "times"), [(0, 1), (REACH, 1), (REACH + 1, 2), (3 * REACH, 4)])
def test_pieces_are_longer_where_short_ones_do_not_pay(least_rows: float, times: int) -> None:
    control, ids = frozenset[int](), np.concatenate([document(number) for number in range(8)])
    pieces = Cutter(tokenizer(), control, least_rows).pieces(ids)
    usual = Cutter(tokenizer(), control).pieces(ids)
    assert max(one.length for one in pieces) <= times * MOST_PIECE
    assert 0.7 * times < len(usual) / len(pieces) < 1.4 * times


def test_beyond_an_edit_the_cuts_stay() -> None:
    """After text is put before, into or behind it, taken out or replaced. A stretch so long that it is divided where it
    ranks highest may change; how many there are depends on the text, which is this project's documentation.
    """
    rng, far = random.Random(0), 0
    sentences = [
        "",
        "word",
        "A sentence that was not there before.",
        "\n\nA paragraph.\n\n",
        "a\n" * 300,
        "# A title\n",
    ]
    for _ in range(300):
        ids, more, gone = document(rng.randrange(8)), encoded(rng.choice(sentences)), rng.choice([0, 1, 30])
        start = rng.choice([0, *rng.choices(range(len(ids) - gone), k=4), len(ids) - gone])
        before, after = cuts(ids), cuts(np.concatenate((ids[:start], more, ids[start + gone :])))
        moved = [c if c <= start else c - len(more) + gone for c in after if not start < c <= start + len(more)]
        changed = {cut for cut in {*before} ^ {*moved} if not start - NEAR <= cut <= start + gone + NEAR}
        assert all(start - NEAR - MOST_PIECE <= cut <= start + gone + NEAR + MOST_PIECE for cut in changed)
        far += bool(changed)
    assert far <= 12


def ending(token: int) -> str:
    """What ends with a token."""
    spelled = tokenizer().decode([int(token)], skip_special_tokens=False)
    if spelled.count("\n") > 1 or spelled == "<|im_end|>":
        return "paragraph"
    return "line" if spelled.endswith("\n") else "sentence" if spelled.rstrip().endswith((".", "!", "?")) else ""


@pytest.mark.parametrize("kind", ["paragraph", "line", "sentence"])
def test_cuts_stand_at_ends_of_paragraphs_lines_and_sentences(kind: str) -> None:
    """Of prose of one kind each, where the better ends are taken out."""
    names = ("concepts.md", "study.md", "security.md", "serving.md")
    text = "\n\n".join(path.read_text() for path in DOCS if path.name in names)
    if kind == "line":
        text = text.replace("\n\n", "\n")
    elif kind == "sentence":
        text = " ".join(text.split())
    ids = encoded(text)
    ends = [ending(ids[cut - 1]) for cut in cuts(ids)]
    assert ends.count(kind) > 0.7 * len(ends), ends
    assert 80 < len(ids) / len(ends) < 320


def test_messages_are_cut_where_they_end() -> None:
    end = tokenizer().token_to_id("<|im_end|>")
    flat = encoded(" ".join(DOCS[0].read_text().split()))
    ids = np.insert(flat, [400, 900, 1500], end)
    assert {401, 902, 1503} <= set(cuts(ids))


@pytest.mark.parametrize("period", [1, 2, 7, 96, 200, 1000])
def test_made_texts_are_cut_too(period: int) -> None:
    rng = np.random.default_rng(period)
    ids = np.resize(rng.integers(0, 1400, period), 100_000).astype(np.int32)
    assert len(cuts(ids)) >= 100_000 // MOST_PIECE - 1


def test_short_and_long_pieces() -> None:
    assert [cutter().pieces(document(0)[:count]) for count in (0, 1)] == [[], [(0, 1)]]
    lengths = [one.length for one in cutter().pieces(np.arange(300).repeat(8).astype(np.int32) % 1400)]
    assert all(length >= LEAST_PIECE for length in lengths[1:-1] if length > REACH)

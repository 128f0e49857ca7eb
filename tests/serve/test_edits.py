"""What an edit changed, and which rows may move behind it, word by word."""

from collections.abc import Sequence

import numpy as np
import pytest

from blend.layout import Place, PlaceOrigin, PromptLayout
from blend.serve.engine.edits import (
    BOUND,
    DEPENDENT,
    INDEPENDENT,
    UNKNOWN,
    Edit,
    EditEvidence,
    Spelling,
    edit_of,
    shown,
    with_changes,
)

TEXT = "".join(f"Line {chr(97 + number)} says that nothing else is known.\n" for number in range(26))


class Letters:
    """A tokenizer whose tokens are characters. As some do, it drops the blank in front of a text."""

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        text = "".join(map(chr, ids))
        return text[1:] if text.startswith(" ") else text


SPELL = Spelling(Letters())


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def edited(before: str, after: str, text: str = TEXT) -> Edit:
    """The edit of `before` to `after`, in front of a text that moves."""
    place = Place(ids(text), PlaceOrigin.NEW)
    edit = edit_of(PromptLayout(ids(after), (place,), ids("?")), ids(before + text))
    assert edit is not None
    return edit


def changed(edit: Edit) -> list[tuple[str, str]]:
    """Each word that changed, before and after."""
    new = "".join(map(chr, edit.layout.token_ids))
    old = "".join(map(chr, edit.earlier))
    return [(old[hunk.old], new[hunk.new]) for hunk in edit.hunks(SPELL)]


def test_the_size_of_an_edit_counts_what_stands_in_front_of_moved_rows_alone() -> None:
    """Tokens that one prompt has and the other lacks, for each moved row, between the moved texts too."""
    first, second = ids(TEXT[:600]), ids(TEXT[700:])
    places = (Place(first, PlaceOrigin.NEW), Place(ids("inserted\n"), PlaceOrigin.TEXT), Place(second, PlaceOrigin.NEW))
    layout = PromptLayout(ids("At 10:02\n"), places, ids("another question?"))
    edit = edit_of(layout, ids("At 10:01\n" + TEXT[:600] + "removed, longer\n" + TEXT[700:] + "?"))
    assert edit is not None
    assert [*edit.moving] == [0, 2]
    changed_digit, inserted, removed = 1, 9, 1 + 16
    assert edit.edited == pytest.approx((changed_digit + inserted + removed) / len(first + second), rel=0.2)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            "It is 10:01:37, 1 file.\n",
            "It is 10:02:14, 2 files.\n",
            [("01", "02"), ("37", "14"), ("1", "2"), ("file", "files")],
        ),
        ("It is 10:09, Monday.\n", "It is 10:10, Monday.\n", [("09", "10")]),
        ("Room 311 is ours.\n", "Room 314 is ours.\n", [("311", "314")]),
        ("We have 9 rooms.\n", "We have 10 rooms.\n", [("9", "10")]),
        ("Ours is amber.\n", "Ours is birch.\n", [("amber", "birch")]),
    ],
)
def test_whole_words_change(before: str, after: str, words: list[tuple[str, str]]) -> None:
    assert changed(edited(before, after)) == words


def evidence_of(edit: Edit, changes: float = 0.0) -> EditEvidence:
    """What the edit shows where all text behind it was computed."""
    rows = edit.layout.rows
    compared = np.full(rows, np.nan, np.float32)
    compared[edit.in_order >= 0] = changes
    return shown(edit, None, np.ones(rows, np.bool_), compared, rows, SPELL)


def sound(first: str, second: str, third: str, text: str = TEXT, changes: float = 0.0) -> np.ndarray | None:
    """The rows of the text that may move from the second prompt to the third."""
    evidence = evidence_of(edited(first, second, text), changes)
    return edited(second, third, text).sound(evidence, SPELL)


def test_rows_move_where_numbers_change_again() -> None:
    rows = sound("At 10:01 o'clock\n", "At 10:02 o'clock\n", "At 10:03 o'clock\n")
    assert rows is not None
    assert rows.all()


@pytest.mark.parametrize(
    ("first", "second", "third"),
    [
        ("At 10:01 o'clock\n", "At 10:02 o'clock\n", "At 11:03 o'clock\n"),  # the hour never changed
        ("The team is amber\n", "The team is birch\n", "The team is dune\n"),  # words
        ("At 10:01 o'clock\n", "At 10:02 o'clock\n", "At noon o'clock\n"),
        ("At 10:01 o'clock\n", "At 10:02 o'clock\n", "At 10:03 o'clock. Nothing below holds\n"),
        ("At 10:01 o'clock\n", "At 10:02 o'clock\n", "o'clock\n"),
        ("It has 21 degrees\n", "It has 22 degrees\n", "It has -23 degrees\n"),  # a sign
        ("It has 21 degrees\n", "It has 22 degrees\n", "It has -22 degrees\n"),
        ("It has 21 degrees\n", "It has 22 degrees\n", "It has 22 22 degrees\n"),
        (f"{'no ' * 20}21\n", f"{'no ' * 20}22\n", f"{'no ' * 23}22\n"),  # a text that repeats itself
    ],
)
def test_no_row_moves_behind_another_change(first: str, second: str, third: str) -> None:
    assert sound(first, second, third) is None


def test_no_row_moves_that_changed_with_the_number() -> None:
    assert sound("At 10:01\n", "At 10:02\n", "At 10:03\n", changes=2 * BOUND) is None


@pytest.mark.parametrize("number", ["02", "03"])
def test_a_line_moves_only_up_to_a_number_that_changes(number: str) -> None:
    half = len(TEXT) // 2
    line = f"\nGate {number} is closed today.\n"
    text = TEXT[:half] + line + TEXT[half:]
    rows = sound("At 10:01\n", "At 10:02\n", "At 10:03\n", text)
    assert rows is not None
    begin = half + line.index(number)
    stop = half + len(line)
    assert rows[:begin].all()
    assert not rows[begin : begin + len(number) + len(" is closed today.")].any()
    assert rows[stop:].all()


def test_a_row_that_once_depended_on_the_words_keeps_to_it() -> None:
    evidence = EditEvidence(np.ones(3, np.bool_), np.array([UNKNOWN, INDEPENDENT, DEPENDENT], np.int8))
    after = with_changes(evidence, np.arange(3), np.array([1.0, 1.0, 0.0], np.float32))
    assert after.rows.tolist() == [DEPENDENT, INDEPENDENT, DEPENDENT]
    assert evidence.rows[0] == UNKNOWN


def test_text_that_comes_again_is_in_order_once() -> None:
    places = (Place(ids(TEXT), PlaceOrigin.NEW),) * 2
    edit = edit_of(PromptLayout(ids("At 10:02\n"), places, ids("?")), ids(f"At 10:01\n{TEXT}"))
    assert edit is not None
    rows = edit.in_order[edit.in_order >= 0]
    assert (np.diff(rows) > 0).all()
    assert len(TEXT) - 40 < len(rows) < np.count_nonzero(edit.source >= 0)


def test_what_goes_on_behind_known_rows_is_unknown() -> None:
    evidence = evidence_of(edited("At 10:01\n", "At 10:02\n"))
    longer = evidence.extended(len(evidence.rows) + 5)
    assert (longer.rows[: len(evidence.rows)] == evidence.rows).all()
    assert (longer.rows[-5:] == UNKNOWN).all()

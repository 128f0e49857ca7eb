"""Why text was computed, in words and tokens, against counts by hand."""

from blend.layout import Span
from blend.serve.reasons import EDITED, NEW, ComputedPart, tokens_by_reason, with_edited


def test_text_behind_an_edit_is_told_once() -> None:
    """Parts are split where an edited span begins and ends inside; a span may begin where its part does."""
    parts = [ComputedPart(10, 40, NEW), ComputedPart(50, 60, NEW)]
    edited = [Span(10, 15), Span(20, 30), Span(55, 70)]
    assert sorted(with_edited(parts, edited)) == [
        ComputedPart(10, 15, EDITED),
        ComputedPart(15, 20, NEW),
        ComputedPart(20, 30, EDITED),
        ComputedPart(30, 40, NEW),
        ComputedPart(50, 55, NEW),
        ComputedPart(55, 70, EDITED),
    ]
    counted = tokens_by_reason(with_edited(parts, edited), reused=12)
    assert [(part.reason, part.tokens) for part in counted] == [(EDITED, 3 + 10 + 15), (NEW, 5 + 10 + 5)]

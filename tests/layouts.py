"""Layouts of prompts with places of several kinds."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from blend.layout import PlaceOrigin, PromptLayout


def marked(
    layout: PromptLayout,
    *,
    plain: Iterable[int] = (),
    parts: Mapping[int, tuple[tuple[int, ...], int]] | None = None,
    learned: Iterable[int] = (),
    new: Iterable[int] = (),
) -> PromptLayout:
    """The prompt with places of ordinary text, of parts `(whole chunk, first row)`, and of text that requests brought."""
    places = list(layout.places)
    for origin, which in ((PlaceOrigin.LEARNED, learned), (PlaceOrigin.NEW, new), (PlaceOrigin.TEXT, plain)):
        for index in which:
            places[index] = places[index]._replace(origin=origin)
    for index, (whole, first) in (parts or {}).items():
        places[index] = places[index]._replace(part_of=whole, first=first)
    return replace(layout, places=tuple(places))

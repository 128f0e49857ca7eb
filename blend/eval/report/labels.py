"""Puts the labels of a scatter plot where they cover neither points, bars nor one another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

# Offsets in points from the point, with the alignment that keeps the text on that side; the first that fits is taken.
_PLACES = (
    *((9, 5, "left", "bottom"), (-9, 5, "right", "bottom"), (9, -5, "left", "top"), (-9, -5, "right", "top")),
    *((0, 9, "center", "bottom"), (0, -9, "center", "top"), (0, 26, "center", "bottom"), (0, -26, "center", "top")),
    *((9, 18, "left", "bottom"), (-9, 18, "right", "bottom"), (9, -18, "left", "top"), (-9, -18, "right", "top")),
    *((9, 32, "left", "bottom"), (-9, 32, "right", "bottom"), (9, -32, "left", "top"), (-9, -32, "right", "top")),
)
# A label no further away than this needs no leader.
_NEAR = 10


def place_labels(axes: Axes) -> None:
    """Move every annotation of a laid-out figure; those that fit nowhere take the place with the least overlap."""
    from matplotlib.text import Annotation

    # Markers, ends of bars and level lines; then the bars themselves. All in pixels.
    taken = list(_marks(axes))
    for label in (child for child in axes.texts if isinstance(child, Annotation)):
        _place(axes, label, taken)
        taken.append(_extent(label))


def _marks(axes: Axes) -> Iterator[Bbox]:
    """Of a line through several points each point, of bars each bar: the box around all of them is mostly empty."""
    from matplotlib.collections import LineCollection
    from matplotlib.transforms import Bbox

    for line in axes.lines:
        points = line.get_transform().transform(line.get_xydata())
        half = line.get_markersize()  # of a marker, in pixels at 144 dpi
        yield from (
            [Bbox.from_extents(x - half, y - half, x + half, y + half).padded(2) for x, y in points]
            if len(points) > 2
            else [line.get_window_extent().padded(2)]
        )
    for bars in axes.collections:
        ends = bars.get_segments() if isinstance(bars, LineCollection) else ()
        yield from (Bbox(bars.get_transform().transform(bar)).padded(2) for bar in ends)


def _place(axes: Axes, label: Annotation, taken: list[Bbox]) -> None:
    costs = []
    for place in _PLACES:
        _move(label, place)
        costs.append(_cost(axes, _extent(label), taken))
        if costs[-1] == 0:
            return
    _move(label, _PLACES[costs.index(min(costs))])


def _move(label: Annotation, place: tuple[int, int, str, str]) -> None:
    x, y, horizontal, vertical = place
    label.set_position((x, y))
    label.set(horizontalalignment=horizontal, verticalalignment=vertical)
    if label.arrow_patch is not None:
        label.arrow_patch.set_visible(max(abs(x), abs(y)) > _NEAR)


def _extent(label: Annotation) -> Bbox:
    """Of the text alone, in pixels; an annotation's own extent takes in its leader."""
    from matplotlib.text import Text

    return Text.get_window_extent(label)


def _cost(axes: Axes, box: Bbox, taken: list[Bbox]) -> float:
    """Area in pixels that is covered already or lies outside the axes."""
    from matplotlib.transforms import Bbox

    covered = (Bbox.intersection(box, other) for other in taken)
    inside = Bbox.intersection(box, axes.get_window_extent())
    outside = box.width * box.height - (inside.width * inside.height if inside else 0)
    return sum(part.width * part.height for part in covered if part) + outside

"""The rows of every selector on one prompt, as they were when its parameters were still fields of `BlendConfig`.

`rows.json` was written by that version: spec -> chosen context rows, and how many rows each layer ran on.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from cases import blended, make_layout
from models import decoder

from blend.config import BlendConfig
from blend.select import SELECTORS, make_selector

LAYOUT = make_layout(prefix=5, chunks=(20, 33, 1, 42, 17), suffix=9, seed=4)
ROWS: dict[str, Any] = json.loads((Path(__file__).parent / "rows.json").read_text())


@pytest.mark.parametrize("spec", ROWS)
def test_the_same_rows_as_before(spec):
    found = blended(decoder("llama"), LAYOUT, BlendConfig(spec, ratio=0.3)).selection
    assert [row for row in found.rows.tolist() if row < LAYOUT.context.stop] == ROWS[spec]["rows"]
    assert list(found.rows_per_layer) == ROWS[spec]["per_layer"]


def test_every_parameter_of_every_selector_is_among_them():
    """And no two of them choose the same, so that a parameter that is read and forgotten shows.

    `gradual` is younger than the file; `test_gradual` has its rows.
    """
    names = {make_selector(spec).name for spec in ROWS}
    assert names | {"gradual"} == set(SELECTORS)
    assert len({str(rows) for rows in ROWS.values()}) == len(ROWS)


def test_the_default_is_query_guided():
    found = blended(decoder("llama"), LAYOUT, BlendConfig(ratio=0.3)).selection
    assert [row for row in found.rows.tolist() if row < LAYOUT.context.stop] == ROWS["query_guided"]["rows"]

"""A long question is looked at in pieces like any other rows: to the same scores, and in no pass of more rows than others."""

from itertools import product

import pytest
import torch
from cases import cache_chunks, make_layout
from dense_reference import assert_close
from models import decoder

from blend.config import BlendConfig
from blend.model.driver import RowDriver
from blend.model.passes import RowRequest, run_steps
from blend.prefill.blender import Blend, Blender
from blend.select import QueryGuided
from blend.store import open_store

LAYOUT = make_layout(suffix=23)
LARGEST = 5


def blended(blender: Blender, selector: QueryGuided, most_rows: int | None) -> Blend:
    steps = blender.steps(LAYOUT, config=BlendConfig(selector, ratio=0.3), most_rows=most_rows)
    return run_steps(steps, lambda request: blender.decoder.prefill([request]))


def filled(name: str, lacking: int) -> Blender:
    blender = cache_chunks(Blender(decoder(name), open_store("memory:", codec="native")), LAYOUT)
    for chunk in LAYOUT.chunks[:lacking]:
        blender.store.delete(blender.encoder(LAYOUT.prefix).identity.key(chunk))
    return blender


@pytest.mark.usefixtures("nan_buffers")
@pytest.mark.parametrize(
    ("name", "lacking", "layers"),
    [*product(["llama"], [0, 1], ["middle", "all"]), ("gemma2", 0, "all"), ("mistral", 0, "middle")],
)
def test_pieces_give_the_scores_of_one_pass(name, lacking, layers):
    blender, selector = filled(name, lacking), QueryGuided(layers)
    whole = blended(blender, selector, None)
    assert whole.selection.scores is not None
    for most_rows in (1, LARGEST, 22, 23):
        pieces = blended(blender, selector, most_rows)
        assert pieces.selection.scores is not None
        assert_close(pieces.selection.scores, whole.selection.scores)
        assert torch.equal(pieces.selection.rows, whole.selection.rows)
        assert_close(pieces.logits, whole.logits)


@pytest.mark.parametrize("layers", ["middle", "all"])
def test_no_pass_has_more_rows_than_it_may(layers, monkeypatch):
    blender, passes = filled("llama", 0), list[int]()
    run = RowDriver.run

    def counted(driver: RowDriver, requests: list[RowRequest], **more: object) -> object:
        passes.append(sum(request.positions.shape[0] for request in requests))
        return run(driver, requests, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(RowDriver, "run", counted)
    blended(blender, QueryGuided(layers), LARGEST)
    assert max(passes) == LARGEST
    assert passes[:5] == [LARGEST] * 4 + [3]

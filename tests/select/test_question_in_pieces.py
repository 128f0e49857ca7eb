"""A long question is looked at in pieces like any other rows: to the same scores, and in no pass of more rows than others."""

from itertools import product

import numpy as np
import pytest
import torch
from cases import cache_chunks, make_layout
from dense_reference import assert_close
from models import decoder

from blend.config import BlendConfig
from blend.model.driver import RowDriver
from blend.model.passes import RowRequest
from blend.prefill.blender import Blender
from blend.prefill.question import QueryAttention
from blend.select import QueryGuided, QueryScore
from blend.store import open_store
from tests.blend.blends import counted_rows, prefill_in_steps

LAYOUT = make_layout(suffix=23)
LARGEST = 5


def blender_of(name: str, layers: str, lacking: int = 0) -> Blender:
    """Its store lacks the caches of the first chunks."""
    config = BlendConfig(QueryGuided(layers), ratio=0.3)
    return cache_chunks(Blender(decoder(name), open_store("memory:"), config), LAYOUT, range(lacking, 4))


@pytest.mark.usefixtures("nan_buffers")
@pytest.mark.parametrize(
    ("name", "lacking", "layers"),
    [*product(["llama"], [0, 1], ["middle", "all"]), ("gemma2", 0, "all"), ("mistral", 0, "middle")],
)
def test_pieces_give_the_scores_of_one_pass(name, lacking, layers):
    blender = blender_of(name, layers, lacking)
    whole = prefill_in_steps(blender, LAYOUT)
    for most_rows in (1, LARGEST, 22, 23):
        pieces = prefill_in_steps(blender, LAYOUT, most_rows=most_rows)
        assert_close(pieces.selection.scores, whole.selection.scores)
        assert torch.equal(pieces.selection.rows, whole.selection.rows)
        assert_close(pieces.logits, whole.logits)


@pytest.mark.parametrize(("layers", "shown"), [("1", 1), ("all", LARGEST)])
def test_the_question_asks_for_logits_only_where_it_scores_the_last_layer(layers, shown):
    """That layer runs no rows of which no logits are wanted."""
    blender = blender_of("llama", layers)
    with counted_rows(blender.decoder) as counts:
        prefill_in_steps(blender, LAYOUT, most_rows=LARGEST)
    assert counts["head"][:4] == [shown] * 4


@pytest.mark.parametrize("most_rows", [None, LARGEST])
def test_rows_that_run_with_the_question_do_not_count(most_rows):
    """As the leads of chunks do for recurrent layers."""
    blend = blender_of("llama", "all").prefill(LAYOUT, config=BlendConfig("all"))

    def attention(also: list[int]) -> torch.Tensor:
        question = QueryAttention(blend.decoder, blend.cache, LAYOUT, QueryScore("all"), also=np.array(also, np.int64))
        for piece in question.rows.pieces(most_rows):
            ids = torch.tensor(LAYOUT.token_ids)[None, piece.positions]
            blend.decoder.prefill([RowRequest(ids, piece, blend.cache, observe=question.observe, outputs=piece.rows)])
        return question.attention()

    assert_close(attention([6, 7, 8, 26, 27, 28, 29]), attention([]))


@pytest.mark.parametrize("layers", ["middle", "all"])
def test_no_pass_has_more_rows_than_it_may(layers, monkeypatch):
    blender, passes, run = blender_of("llama", layers), list[int](), RowDriver.run

    def counted(driver: RowDriver, requests: list[RowRequest], **more: object) -> object:
        passes.append(sum(request.positions.shape[0] for request in requests))
        return run(driver, requests, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(RowDriver, "run", counted)
    prefill_in_steps(blender, LAYOUT, most_rows=LARGEST)
    assert max(passes) == LARGEST
    assert passes[:5] == [LARGEST] * 4 + [3]

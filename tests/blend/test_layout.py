"""Token ids of a prompt in all forms in which tokenizers return them, and what is none."""

import numpy as np
import pytest
import torch

from blend import PromptLayout
from blend.errors import PromptError

TUPLES = PromptLayout.of_chunks((1, 2), [(5, 6, 7), (8, 9)], (3,), (1,))
FORMS = {
    "lists": list,
    "numpy": np.array,
    "int32": lambda ids: np.array(ids, np.int32),
    "torch": torch.tensor,
    "numpy's numbers": lambda ids: tuple(np.array(ids)),
    "generator": iter,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_token_ids_come_in_any_form(form):
    layout = PromptLayout.of_chunks(form((1, 2)), [form((5, 6, 7)), form((8, 9))], form((3,)), form((1,)))
    assert layout == TUPLES
    assert hash(layout) == hash(TUPLES)
    assert {type(number) for number in layout.token_ids} == {int}


@pytest.mark.parametrize(
    "ids",
    ["text", b"bytes", [[5, 6]], torch.tensor([[5]]), [5.0, 6.0], ["5"], [True], (5, -1), 5, None, {"input_ids": [5]}],
    ids=repr,
)
@pytest.mark.parametrize("place", ["prefix", "chunk 1", "suffix", "canonical_prefix"])
def test_what_is_no_list_of_token_ids_is_refused_by_name(ids, place):
    if place == "canonical_prefix" and ids is None:
        pytest.skip("it may be left out")
    prompt = {"prefix": [1], "suffix": [3], "canonical_prefix": [1], "chunk 1": [9], place: ids}
    chunks = [[4], prompt.pop("chunk 1")]
    with pytest.raises(PromptError, match=f"^{place} "):
        PromptLayout.of_chunks(chunks=chunks, **prompt)

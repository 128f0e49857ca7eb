"""Models that are loaded at the same time: transformers replaces methods of its classes while it loads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from blend.layout import PromptLayout
from blend.model.decoder import Decoder, full_prefill
from tests.tiny_model import save_tiny_model

PROMPT = PromptLayout.of_chunks((1, 2), (), (3, 4))


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    folder = str(save_tiny_model(tmp_path, "the harbour has a gate", tie_word_embeddings=True))
    method = PreTrainedModel.tie_weights

    def logits(_: int) -> Tensor:
        return full_prefill(Decoder.load(folder, device="cpu", dtype="float32"), PROMPT).logits

    expected = logits(0)
    with ThreadPoolExecutor(4) as pool:
        for answer in pool.map(logits, range(16)):
            assert answer.equal(expected)
    assert PreTrainedModel.tie_weights is method

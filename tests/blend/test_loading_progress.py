"""How much of a model's weights is loaded is reported while it is loaded."""

from pathlib import Path

import pytest
from transformers.utils import logging

from blend.errors import ConfigError
from blend.model.decoder import Decoder
from tests.tiny_model import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("loading") / "tiny", "The harbour has gates and a bell.")


def test_tensors_are_counted(model: Path) -> None:
    steps = list[tuple[str, int, int]]()
    decoder = Decoder.load(str(model), progress=lambda *step: steps.append(step))
    total = len(list(decoder.model.parameters()))
    assert steps[0] == ("load", 0, 0), "nothing is known yet"
    assert steps[1:-1] == [("load", number, total) for number in range(total)]
    assert steps[-1] == ("load", total, total)


def test_a_model_that_cannot_be_loaded_ends_its_stage(model: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in model.iterdir():
        content = b"{}" if file.suffix == ".safetensors" else file.read_bytes()
        (damaged / file.name).write_bytes(content)
    steps = list[tuple[str, int, int]]()
    before = logging.set_tqdm_hook(None)
    with pytest.raises(ConfigError):
        Decoder.load(str(damaged), progress=lambda *step: steps.append(step))
    assert logging.set_tqdm_hook(before) is None, "transformers is left as it was"
    assert steps == [("load", 0, 0), ("load", 1, 1)]

import pytest
from tiny_model import save_tiny_model
from towns import document


@pytest.fixture(autouse=True)
def _unwritten_rows_are_nan(nan_buffers: None) -> None:
    """Every test of the engine runs on poisoned buffers."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model whose tokenizer knows a document of `towns`."""
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model", document("harbour", 7)))

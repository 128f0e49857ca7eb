import pytest


@pytest.fixture(autouse=True)
def _unwritten_rows_are_nan(nan_buffers: None) -> None:
    """Every test of the engine runs on poisoned buffers."""

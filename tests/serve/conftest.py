"""A tiny model and a server over it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from served import Served, serving
from standin import SimpleService

from blend.model.decoder import Decoder
from tests.tiny_model import save_tiny_model

TEXT = "The harbour of town 3 opened in 1821. The orchard has gates and a bell.\n" * 5


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return Decoder.load(str(save_tiny_model(tmp_path_factory.mktemp("m") / "tiny", TEXT)), name="tiny", device="cpu")


@pytest.fixture(scope="module")
def served(tiny: Decoder) -> Iterator[Served]:
    with serving(SimpleService(tiny), body_bytes=100_000, keep_alive_s=0.2) as found:
        yield found


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client

"""OpenAI's own client against a server that listens."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from served import Served, serving
from standin import SimpleService

from blend.model.decoder import Decoder
from tests.tiny_model import save_tiny_model

TEXT = "The harbour of town 3 opened in 1821. The orchard has gates and a bell.\n" * 5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return Decoder.load(str(save_tiny_model(tmp_path_factory.mktemp("m") / "tiny", TEXT)), name="tiny", device="cpu")


@pytest.fixture
def served(tiny: Decoder) -> Iterator[Served]:
    with serving(SimpleService(tiny)) as found:
        yield found


def test_whole_and_streamed(served: Served) -> None:
    with openai.OpenAI(base_url=served.base_url, api_key="x", max_retries=0) as client:
        asked = [{"role": "user", "content": "When did the harbour open?"}]
        whole = client.chat.completions.create(model="tiny", messages=asked, max_tokens=8)
        parts = list(
            client.chat.completions.create(
                model="tiny", messages=asked, max_tokens=8, stream=True, stream_options={"include_usage": True}
            )
        )
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 8
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert parts[-1].usage == whole.usage

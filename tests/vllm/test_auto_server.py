"""vLLM's own server that blends with its own model where that can be, and else with the prefill process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from machines import HEADERS, Machines, fill, rag_over

pytestmark = pytest.mark.inside_vllm
TOKENS, TOP_K = 12, 4
QUESTION = "How many gates does the harbour have?"
CORPUS: dict[str, Any] = {"chunk_tokens": 96, "top_k": TOP_K, "codec": "native"}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return fill(tmp_path_factory.mktemp("filled"))


@pytest.fixture
def machines(filled: tuple[Path, Path], tmp_path: Path) -> Iterator[Machines]:
    found = Machines(tmp_path, shutil.copytree(filled[0], tmp_path / "store"), filled[1])
    try:
        found.start_prefill("--no-learn", "--prefix-budget", "0", "--memory-budget", "0")
        yield found
    finally:
        found.end()


@pytest.mark.parametrize(
    ("module", "method"), [("blend.integrations.vllm.connector", "rows"), ("rows_refused", "blend")]
)
def test_whoever_can_blends(machines: Machines, module: str, method: str) -> None:
    options = {"stage": "auto", "socket": machines.socket, "store": str(machines.store), "ratio": 0.15, **CORPUS}
    server = machines.start_server(options, module, KVBLEND_VLLM_TIMEOUT="240")
    body = {
        "model": "tiny+corpus",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
    }
    url = f"{machines.url}/v1/chat/completions"
    for _ in range(2):  # the second finds the blocks of the first
        response = httpx.post(url, json=body, headers=HEADERS, timeout=300)
        assert response.status_code == 200, response.text
        told = response.json()
        assert told["kvblend"]["figures"]["method"] == method
        assert len(told["kvblend"]["sources"]) == TOP_K
        own = rag_over(machines.store, machines.model).answer(QUESTION, max_new_tokens=TOKENS).text
        assert told["choices"][0]["message"]["content"].strip().rstrip("\ufffd") == own.strip().rstrip("\ufffd")
    assert ("use stage copied, which is done now" in server.said) == (method == "blend")
    assert machines.metrics()["vllm:external_prefix_cache_hits_total"] > 0

"""A tiny model whose answers depend on its weights, a store of its chunks, and `blend serve` in front of a llama-server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import transformers

from blend import BlendConfig, CorpusConfig, Rag
from blend.integrations.llamacpp.library import find_library
from tests import towns
from tests.cli.blend_process import Blend, Running, serving
from tests.llamacpp.gguf_files import save_gguf
from tests.llamacpp.llama_servers import llama_server
from tests.tiny_model import save_tiny_model

OPTIONS = {"threads": 1, "tokens": 2304}
TEXTS = list(towns.documents().values())
QUESTION = (
    "How many gates does the harbour have, and who of all the keepers counts the visitors of the glacier on Sundays?"
)


def save_model(folder: Path, seed: int = 0) -> Path:
    """A GGUF file."""
    place = save_tiny_model(folder / "hf", "\n".join(TEXTS), seed=seed, initializer_range=0.3)
    model = transformers.AutoModelForCausalLM.from_pretrained(place)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(place)
    return save_gguf(folder / "tiny.gguf", model, tokenizer)


def made_rag(file: Path, folder: Path) -> Rag:
    """A store with the caches of all towns' documents, in chunks of most of a document."""
    towns.write_documents(folder / "documents")
    corpus = CorpusConfig(chunk_tokens=256, embedder="words", surrogate_tokens=0)
    rag = Rag(
        folder / "store",
        model=str(file),
        engine="llamacpp",
        engine_options=OPTIONS,
        corpus=corpus,
        blend=BlendConfig(correction=False),
    )
    rag.precompute([folder / "documents"], quick=True)
    return rag


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    """The body of a chat completion about these texts."""
    content = "\n\n".join([*texts, QUESTION])
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0, **fields}


def said(reply: httpx.Response) -> str:
    """A chat completion's answer."""
    assert reply.status_code == 200, reply.text
    content: str = reply.json()["choices"][0]["message"]["content"]
    return content


def reused(reply: httpx.Response) -> int:
    """Rows that were not computed, as a reply's header says."""
    return int(reply.headers["x-kvblend-rows"].partition(" ")[0])


@dataclass
class Front:
    """A proxy, and the server behind it. run: the proxy's process."""

    proxy: httpx.Client
    server: httpx.Client
    run: Running
    slots: Path


@dataclass
class Fronts:
    """Starts proxies of one model. blend: the command line, its store filled or not."""

    blend: Blend
    model: Path

    @contextmanager
    def front(self, *options: str, server: httpx.Client | None = None, **of_server: Any) -> Iterator[Front]:
        """A proxy of a server. options: of `blend serve`. server: one that runs; else one is started."""
        slots = self.blend.folder / "slots"
        slots.mkdir(exist_ok=True)
        if server is None:
            with llama_server(self.model, slots, **of_server) as server, self.front(*options, server=server) as front:
                yield front
            return
        url = str(server.base_url).rstrip("/")
        with serving(self.blend, "--upstream", url, "--slots", slots, *options) as (run, proxy):
            yield Front(proxy, server, run, slots)
        assert not list(slots.iterdir()), "slot files stay"


def environment() -> dict[str, str]:
    """Of the command line."""
    return {"KVBLEND_ENGINE_OPTIONS": json.dumps({**OPTIONS, "library": str(find_library())})}

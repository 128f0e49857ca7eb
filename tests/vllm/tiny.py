"""A tiny random model whose answers depend on every row, blended prompts of given lengths, and a pool of KV for vLLM."""

import secrets
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from blend.config import BlendConfig
from blend.integrations.vllm.server import PrefillServer
from blend.integrations.vllm.transport import KVPool, bind, close
from blend.model.decoder import Decoder
from blend.prefill.blender import Blend, Blender
from blend.store import open_store
from blend.types import PromptLayout

VOCABULARY = 512


def save_model(folder: Path, **changes: Any) -> Path:
    """Weights so large that a wrong row of KV changes the next token. changes: of the configuration."""
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    config = Qwen2Config(**{**shape, **changes})
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).float().eval()
    for module in model.modules():
        if getattr(module, "bias", None) is not None:
            torch.nn.init.normal_(module.bias, std=0.2)
    model.save_pretrained(folder)
    return folder


@dataclass
class Bench:
    """A decoder with some chunks in its store, and what vLLM may fetch."""

    model: Path
    decoder: Decoder
    blender: Blender
    pool: KVPool
    socket: str
    kept: ExitStack

    def layout(self, rows: int, seed: int) -> PromptLayout:
        """A prompt of so many tokens: three chunks that are in the store, behind the prefix that they were computed behind."""
        random = torch.Generator().manual_seed(seed)

        def tokens(count: int) -> tuple[int, ...]:
            return tuple(torch.randint(5, VOCABULARY, (count,), generator=random).tolist())

        prefix, suffix = tuple(range(7, 15)), tokens(9)
        each = (rows - len(prefix) - len(suffix)) // 3
        chunks = (tokens(each), tokens(each), tokens(rows - len(prefix) - len(suffix) - 2 * each))
        layout = PromptLayout.of_chunks(prefix, chunks, suffix)
        library = self.blender.library(prefix)
        library.compute(library.missing(chunks))
        return layout

    def blended(self, layout: PromptLayout, ratio: float) -> Blend:
        return self.blender.prefill(layout, config=BlendConfig(ratio=ratio, correction=False))

    def hold(self, blend: Blend) -> str:
        """The ticket for it."""
        ticket = self.kept.enter_context(self.pool.ticket())
        self.pool.put(ticket, blend.cache, blend.layout.token_ids)
        return ticket

    def greedy(self, blend: Blend, count: int) -> list[int]:
        """What kvblend itself decodes."""
        cache, logits, found = blend.cache.clone(count), blend.logits, []
        with torch.inference_mode():
            while True:
                found.append(int(logits[-1].argmax()))
                if len(found) == count:
                    return found
                logits = self.decoder.append(torch.tensor([found[-1:]]), cache)[0]

    def full(self, layout: PromptLayout, count: int) -> list[int]:
        """The same after full prefill."""
        return self.greedy(self.blender.prefill(layout.all_plain()), count)


@contextmanager
def serving(service: Any, pool: KVPool, name: str, **more: Any) -> Iterator[PrefillServer]:
    """A prefill server without its process. service: None where only KV is fetched. more: of the server."""
    place = bind(name)
    server = PrefillServer(service, pool, place, **more)
    thread = threading.Thread(target=server.serve_until_stopped, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(10)
        close(place, name)
        assert not thread.is_alive()


@contextmanager
def bench(model: Path, dtype: torch.dtype = torch.float32) -> Iterator[Bench]:
    """dtype: that it computes in."""
    decoder = Decoder(Qwen2ForCausalLM.from_pretrained(model, dtype=dtype), None, "tiny")
    blender = Blender(decoder, open_store("memory:"))
    pool, socket = KVPool(1 << 30), f"@kvblend-test-{secrets.token_hex(4)}"
    with serving(None, pool, socket), ExitStack() as kept:
        yield Bench(model, decoder, blender, pool, socket, kept)

"""vLLM with the stage that recomputes rows, for proofs in a process of their own: prompts, and what it makes of them.

Imported before vLLM is started: it says how.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    VLLM_USE_V2_MODEL_RUNNER="0",
    HF_HUB_OFFLINE="1",
)

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.inputs import TokensPrompt

from blend.blender import Blend
from blend.integrations.vllm.contract import LayoutTicket, Signer
from blend.model.decoder import Decoder
from blend.types import PromptLayout

LENGTHS = (127, 128, 129, 517, 630)
STEPS = 16
SETTINGS: dict[str, Any] = {"ratio": 0.15, "correction": False}


def prompt(length: int) -> PromptLayout:
    """A prefix of 20 tokens, four chunks, of which none ends where a block does, and a question of 9."""
    draw = torch.Generator().manual_seed(length)
    ids = torch.randint(5, 512, (length,), generator=draw).tolist()
    shared = torch.randint(5, 512, (20,), generator=torch.Generator().manual_seed(7)).tolist()
    cuts = [20, *(20 + (length - 29) * part // 9 for part in (2, 4, 7)), length - 9]
    chunks = tuple(tuple(ids[a:b]) for a, b in pairwise(cuts))
    return PromptLayout(tuple(shared), chunks, tuple(ids[-9:]))


def greedy(decoder: Decoder, blend: Blend) -> list[int]:
    """By kvblend's own decoding."""
    found, logits = list[int](), blend.logits[0]
    for _ in range(STEPS):
        found.append(int(logits.argmax()))
        logits = decoder.append(torch.tensor([[found[-1]]]), blend.cache)[0, -1]
    return found


def far(mine: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    return float((mine - other).abs().amax() / other.abs().amax())


class Engine:
    """An offline vLLM in this process, its workers too where there is one. options: of the connector. more: of vLLM."""

    def __init__(self, model: Path, store: Path, module: str, options: dict[str, Any], **more: Any) -> None:
        self.llm = LLM(
            str(model),
            **{"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, **more},
            max_model_len=1024,
            max_num_seqs=8,
            max_num_batched_tokens=1024,
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVBlend",
                kv_role="kv_consumer",
                kv_load_failure_policy="recompute",
                kv_connector_module_path=module,
                kv_connector_extra_config={"stage": "rows", "store": str(store), **SETTINGS, **options},
            ),
        )
        self._signer = Signer.of(self.llm.llm_engine.vllm_config)

    def decoded(
        self, layouts: list[PromptLayout], salt: str, *, tickets: bool = True, brought: bool = False
    ) -> list[list[int]]:
        """Greedy tokens of these prompts together, blended or plain. brought: by a client, with all their chunks."""
        return self.answers(self.asked(layouts, salt, tickets=tickets, brought=brought))

    def asked(
        self, layouts: list[PromptLayout], salt: str, *, tickets: bool = True, brought: bool = False
    ) -> list[tuple[TokensPrompt, SamplingParams]]:
        """What `answers` takes for them."""
        found = []
        for number, layout in enumerate(layouts):
            told = LayoutTicket(layout, "", frozenset(range(len(layout.chunks)) if brought else ())).ticket()
            mine = f"{salt}{number}"
            extra = {"kv_transfer_params": self._signer.signed(told, mine)} if tickets else None
            parameters = SamplingParams(
                temperature=0, max_tokens=STEPS, ignore_eos=True, detokenize=False, extra_args=extra
            )
            found.append((TokensPrompt(prompt_token_ids=list(layout.token_ids), cache_salt=mine), parameters))
        return found

    def answers(self, asked: list[tuple[TokensPrompt, SamplingParams]]) -> list[list[int]]:
        """Greedy tokens, all at once."""
        prompts, parameters = map(list, zip(*asked, strict=True))
        return [list(one.outputs[0].token_ids) for one in self.llm.generate(prompts, parameters, use_tqdm=False)]

    def idle(self) -> int:
        """The engine's own loop until it has nothing to do; how many steps."""
        core, steps = self.llm.llm_engine.engine_core.engine_core, 0
        while core.scheduler.has_requests():
            core.step_fn()
            steps += 1
        return steps

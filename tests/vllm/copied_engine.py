"""An offline vLLM with the connector of the stage that copies KV."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blend.integrations.vllm.contract import Signer
from blend.types import PromptLayout

COUNT = 12
LATE, FAILS = 1, 2  # last tokens of prompts for which the second worker of `ranks_connector` is late, or fails
MODULE = "blend.integrations.vllm.connector"


class Engine:
    """An offline vLLM with the connector."""

    def __init__(
        self, model: Path, socket: str, options: dict[str, Any], more: dict[str, Any], module: str = MODULE
    ) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        connector = KVTransferConfig(
            kv_connector="KVBlend",
            kv_connector_module_path=module,
            kv_role="kv_consumer",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"socket": socket, **options},
        )
        self.llm = LLM(
            str(model),
            **{
                "skip_tokenizer_init": True,
                "dtype": "float32",
                "enforce_eager": True,
                "max_model_len": 1024,
                "max_num_seqs": 16,
                "kv_transfer_config": connector,
                **more,
            },
        )
        self._signer = Signer.of(self.llm.llm_engine.vllm_config)

    def _given(self, given: Any, salt: str | None) -> dict[str, Any] | None:
        """What the middleware would say of a ticket; whatever else a client says."""
        told = self._signer.signed(given, salt or "") if isinstance(given, str) else given
        return {"kv_transfer_params": told} if told else None

    def tokens(self, asked: Sequence[tuple[PromptLayout, Any, str | None]], count: int = COUNT) -> list[list[int]]:
        """Greedy answers to prompts together, each with its ticket, or other kv_transfer_params, and its cache salt."""
        return [list(output.outputs[0].token_ids) for output in self.outputs(asked, count)]

    def outputs(
        self, asked: Sequence[tuple[PromptLayout, Any, str | None]], count: int = COUNT, **sampling: Any
    ) -> list[Any]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        prompts = [
            TokensPrompt(prompt_token_ids=list(layout.token_ids), **({"cache_salt": salt} if salt else {}))
            for layout, _, salt in asked
        ]
        parameters = [
            SamplingParams(
                temperature=0,
                max_tokens=count,
                ignore_eos=True,
                detokenize=False,
                extra_args=self._given(given, salt),
                **sampling,
            )
            for _, given, salt in asked
        ]
        return list(self.llm.generate(prompts, parameters, use_tqdm=False))

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm


@contextmanager
def started(model: Path, socket: str, *, load: str = "async", module: str = MODULE, **more: Any) -> Iterator[Engine]:
    engine = Engine(model, socket, {"load": load}, more, module)
    try:
        yield engine
    finally:
        engine.close()


def salt() -> str:
    return secrets.token_hex(8)

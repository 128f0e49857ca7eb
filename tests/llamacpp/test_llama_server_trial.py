"""`blend serve --upstream` tries its server: each mistake is one line, and a server that changes is tried again."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from blend.integrations.llamacpp.library import Library
from tests.cli.blend_process import Blend, preloaded, serving
from tests.llamacpp.llama_fronts import TEXTS, chat, environment, made_rag, reused, said, save_model
from tests.llamacpp.llama_servers import llama_server

MANY: dict[str, Any] = {"n_parallel": 4, "kv_unified": True}
CHANGED = "llama-server has changed, and is tried again"


@pytest.fixture(scope="module")
def model(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file."""
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def changed_model(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with other weights."""
    return save_model(tmp_path_factory.mktemp("changed"), seed=1)


@pytest.fixture(scope="module")
def blend(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Blend]:
    """The command line over a store of the model's."""
    folder = tmp_path_factory.mktemp("cli")
    rag = made_rag(model, tmp_path_factory.mktemp("rag"))
    with preloaded() as process:
        yield Blend(process, folder, model, rag.root, env=environment())


def refusal(blend: Blend, url: str, slots: Path) -> str:
    """The line with which the command ends."""
    result = blend("serve", "--port", "0", "--upstream", url, "--slots", slots)
    assert (result.code, result.out) == (2, "")
    return result.err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("of_server", "says"),
    [
        ({"endpoint_slots": False}, "--no-slots"),
        ({"api_keys": ["secret"]}, "give it with --api-key"),
        ({"n_parallel": 2, "kv_unified": False}, "--kv-unified"),
        ({"cache_type_k": 30, "cache_type_v": 30}, "--engine-options"),
        ({"flash_attn_type": 0}, "-fa on"),
    ],
    ids=["no slots", "a key", "several streams", "bfloat16", "transposed values"],
)
def test_a_server_that_cannot_be_used_is_refused(
    blend: Blend, model: Path, tmp_path: Path, of_server: dict[str, object], says: str
) -> None:
    """With the option that helps."""
    with llama_server(model, tmp_path, **of_server) as server:
        assert says in refusal(blend, str(server.base_url), tmp_path)


def test_the_folder_must_be_the_servers(blend: Blend, model: Path, tmp_path: Path) -> None:
    """None, or another one."""
    slots, wrong = tmp_path / "slots", tmp_path / "wrong"
    slots.mkdir()
    wrong.mkdir()
    with llama_server(model, None) as server:
        assert f"start it with --slot-save-path {slots}" in refusal(blend, str(server.base_url), slots)
    with llama_server(model, slots) as server:
        assert "give both the same folder" in refusal(blend, str(server.base_url), wrong)
    assert not list(wrong.iterdir())


def test_the_server_must_run_the_model(blend: Blend, changed_model: Path, tmp_path: Path) -> None:
    """Weights of the same sizes give other likely tokens."""
    with llama_server(changed_model, tmp_path) as server:
        line = refusal(blend, str(server.base_url), tmp_path)
        slots = server.get("/slots").json()
    assert "computes with other weights" in line
    assert str(changed_model) in line
    assert not slots[0]["is_processing"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--upstream", "http://127.0.0.1:9"), "needs --slots"),
        (("--upstream", "127.0.0.1:8080"), "is no URL such as"),
        (("--upstream", "http://127.0.0.1:9", "--slots", "missing"), "is no folder"),
        (("--slots", "."), "--slots goes with --upstream"),
        (("--upstream", "http://127.0.0.1:9", "--slots", ".", "--audit", "0.5"), "--audit does not go with"),
        (
            ("--upstream", "http://127.0.0.1:9", "--slots", ".", "--engine", "transformers"),
            "goes with --engine llamacpp",
        ),
        (("--upstream", "http://127.0.0.1:9", "--slots", "."), "does not answer at http://127.0.0.1:9"),
    ],
)
def test_mistakes_in_options_are_one_line(blend: Blend, options: tuple[str, ...], says: str) -> None:
    """Before a model is loaded."""
    result = blend("serve", "--port", "0", *options)
    assert result.code == 2
    assert says in " ".join(result.err.split())
    assert "Loading" not in result.err


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port: int = place.getsockname()[1]
        return port


def test_a_server_with_a_key_is_asked_with_it(blend: Blend, model: Path, tmp_path: Path) -> None:
    """The client's key goes through; a wrong one is refused."""
    body = chat(TEXTS[0], TEXTS[1])
    with llama_server(model, tmp_path, api_keys=["secret"], **MANY) as server:
        options = ("--upstream", str(server.base_url), "--slots", tmp_path, "--api-key", "secret", "--no-correction")
        with serving(blend, *options) as (_, proxy):
            assert proxy.post("/v1/chat/completions", json=body).status_code == 401
            reply = proxy.post("/v1/chat/completions", json=body, headers={"authorization": "Bearer secret"})
            assert reused(reply) > 200


def test_a_server_that_is_started_anew_is_tried_again(
    blend: Blend, model: Path, changed_model: Path, tmp_path: Path
) -> None:
    """Rows of one model never reach another. While the server is away, clients are told so."""
    address: dict[str, Any] = {"port": free_port(), **MANY}
    first = ExitStack()
    server = first.enter_context(llama_server(model, tmp_path, **address))
    options = ("--upstream", str(server.base_url), "--slots", tmp_path, "--no-correction", "--no-learn")
    with first, serving(blend, *options) as (run, proxy):

        def ask(*topics: int) -> httpx.Response:
            return proxy.post("/v1/chat/completions", json=chat(*(TEXTS[topic] for topic in topics)))

        assert reused(ask(0, 1)) > 200
        first.close()
        away = ask(1, 2)
        assert away.status_code == 502
        assert "does not answer" in away.json()["error"]["message"]
        with llama_server(changed_model, tmp_path, **address) as changed:
            replies = [ask(2, 3)]
            run.until(lambda: "upstream_refused" in run.err)
            replies += [ask(3, 4)]
            assert [reused(reply) for reply in replies] == [0, 0]
            assert [reply.headers["x-kvblend-reason"] for reply in replies] == [CHANGED, CHANGED]
            bodies = [chat(TEXTS[2], TEXTS[3]), chat(TEXTS[3], TEXTS[4])]
            alone = [said(changed.post("/v1/chat/completions", json=body)) for body in bodies]
            assert [said(reply) for reply in replies] == alone
        with llama_server(model, tmp_path, **address):
            assert reused(ask(4, 5)) == 0
            run.until(lambda: "upstream_changed" in run.err)
            assert reused(ask(5, 6)) > 200

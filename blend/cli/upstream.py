"""`blend serve --upstream`: a proxy in front of a llama-server, which answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from click.core import ParameterSource

from blend.cli import opening
from blend.cli.console import note
from blend.errors import ConfigError
from blend.model.engines import TRANSFORMERS
from blend.text import shown
from blend_retrieval.installation import install_command

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from blend.serve.http.keys import ApiKeys
    from blend.serve.limits import RequestLimits

Load = Callable[[], Callable[[], object]]
"""Loads what a server needs, and returns what closes it."""

_ENGINE = "llamacpp"
_OF_ANSWERS = (
    *("full", "audit", "max_new_tokens", "most_running", "most_waiting", "kv_budget", "prefix_budget", "gpu_budget"),
    *(
        "api_keys",
        "top_k",
        "reranker",
        "min_score",
        "embedder",
        "chat_instructions",
        "quality",
        "flips",
        "reproducible",
    ),
    *("device", "dtype", "weights", "device_path"),
)
"""Options of the server that answers by itself."""


def upstream_url(value: str) -> str:
    """The URL of a server. Raises `ConfigError`."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"{shown(value)} is no URL such as http://127.0.0.1:8080")
    return value.rstrip("/")


def check(values: dict[str, Any], source_of: Callable[[str], ParameterSource | None]) -> None:
    """Check --upstream and the options that go with it; the engine is then llama.cpp. Raises `ConfigError`."""
    if not values["upstream"]:
        if values["slots"]:
            raise ConfigError("--slots goes with --upstream")
        return
    if source_of("engine") is ParameterSource.DEFAULT and values["engine"] == TRANSFORMERS:
        values["engine"] = _ENGINE
    if values["engine"] != _ENGINE:
        raise ConfigError("--upstream goes with --engine llamacpp: rows are computed as llama-server does")
    wrong = [name for name in _OF_ANSWERS if source_of(name) is ParameterSource.COMMANDLINE]
    if wrong:
        flag = wrong[0].removeprefix("chat_").replace("_", "-")
        raise ConfigError(f"--{flag} does not go with --upstream, because llama-server answers: leave it out")
    if not values["model"]:
        raise ConfigError("--upstream needs --model: the GGUF file that llama-server runs")
    slots = values["slots"]
    if slots is None:
        raise ConfigError("--upstream needs --slots: the folder of llama-server's --slot-save-path")
    if not slots.is_dir():
        raise ConfigError(f"--slots {slots} is no folder: name that of llama-server's --slot-save-path")
    if find_spec("httpx") is None:
        raise ConfigError(f"--upstream needs httpx: {install_command('llamacpp')}")


def served(values: dict[str, Any], keys: ApiKeys, limits: RequestLimits) -> tuple[Starlette, Load]:
    """The proxy's application, and what loads kvblend behind it. Until then every request is passed on as it is."""
    from blend.integrations.llama_server.app import make_app
    from blend.integrations.llama_server.proxy import Proxy
    from blend.integrations.llama_server.upstream import Upstream

    key = next(iter(values["api_key"]), "")
    proxy = Proxy(Upstream(values["upstream"], key))

    def load() -> Callable[[], object]:
        return _load(values, proxy, key)

    return make_app(proxy, keys, limits), load


def _load(values: dict[str, Any], proxy: Any, key: str) -> Callable[[], object]:
    """Load the model, try the server, and blend from then on. Raises `ConfigError`."""
    from blend.attached.known import KnownTexts
    from blend.integrations.llama_server.slot_files import SlotFiles
    from blend.integrations.llama_server.trial import Trial, reached
    from blend.integrations.llama_server.upstream import Upstream

    async def tried(step: Callable[[Upstream], Any]) -> Any:
        upstream = Upstream(values["upstream"], key)  # connections belong to an event loop
        try:
            return await step(upstream)
        finally:
            await upstream.close()

    asyncio.run(tried(reached))
    rag = opening.open_rag(values, needs_index=False)
    opening.note_caveats(rag)
    learn = 0 if values["no_learn"] else round(values["learn_budget"] * 1e9)
    files = SlotFiles(KnownTexts(rag, rag.blend_config, learn), Path(values["slots"]))
    files.sweep()
    identity = asyncio.run(tried(lambda upstream: Trial(upstream, files).run()))
    longest = files.decoder.context_length or 0
    if longest < identity.longest:
        note(
            f"Prompts of more than {longest:,} tokens are passed on as they are; "
            f"--engine-options '{{\"tokens\": {identity.longest + 256}}}' blends all that fit llama-server's slots"
        )
    files.warm_up()
    proxy.begin(files, identity)
    return files.close

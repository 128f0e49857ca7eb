"""`blend vllm --status`: what an operator's probe asks."""

from __future__ import annotations

import json
import secrets
import threading
from types import SimpleNamespace
from typing import Any, cast

from click.testing import CliRunner

from blend.cli import blend
from blend.integrations.vllm import wire
from blend.integrations.vllm.prefill import PrefillServer
from blend.integrations.vllm.shelf import Shelf
from blend.serve.types import EngineStats


def test_it_tells_what_is_held_and_fails_where_nobody_answers() -> None:
    name = f"@kvblend-{secrets.token_hex(6)}"
    holding = EngineStats(*range(1, len(EngineStats._fields) + 1))
    engine = SimpleNamespace(holding=lambda: holding)
    desk = SimpleNamespace(service=SimpleNamespace(engine=engine), model="m float32", refused="")
    place = wire.bind(name)
    server = PrefillServer(cast(Any, desk), Shelf(1 << 20), place)
    thread = threading.Thread(target=server.serve_until_stopped)
    thread.start()
    try:
        found = CliRunner().invoke(blend, ["vllm", "--status", "--socket", name])
        assert found.exit_code == 0, found.output
        told = {"tickets": 0, "bytes": 0, "model": "m float32", "refused": "", **holding._asdict()}
        assert json.loads(found.output) == told
        desk.refused = "it differs"
        refused = CliRunner().invoke(blend, ["vllm", "--status", "--socket", name])
        assert refused.exit_code == 3
        assert json.loads(refused.stdout) == {**told, "refused": "it differs"}
        assert "vLLM does not use blended KV: it differs" in refused.stderr
    finally:
        server.stop()
        thread.join()
        wire.close(place, name)
    missing = CliRunner().invoke(blend, ["vllm", "--status", "--socket", name])
    assert missing.exit_code == 1
    assert "the prefill process does not answer at" in missing.output

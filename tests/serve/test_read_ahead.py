"""Caches of a store on a server come to this machine while their prompt waits for its turn."""

from pathlib import Path

from cases import cache_chunks
from changing import until
from engines import Held, alone, ask, layouts
from models import decoder

from blend.config import BlendConfig
from blend.prefill.blender import Blender
from blend.serve.engine.scheduler import EmbeddedEngine
from blend.store import open_store
from tests.store import servers

RUNNING, WAITING = layouts(2)


def test_caches_are_copied_once_while_their_prompt_waits(tmp_path: Path) -> None:
    address = f"redis://127.0.0.1:{servers.redis_port()}/0"
    config = BlendConfig(ratio=0.3)
    expected = alone(cache_chunks(Blender(decoder("llama"), open_store(address), config), WAITING), WAITING)
    store = open_store(address, cache=tmp_path)
    engine = EmbeddedEngine(Blender(decoder("llama"), store, config), most_running=1, least_gain=-1000, remember=False)

    running = Held(engine, RUNNING)
    before = store.backend.tier_hits
    waiting = ask(engine, WAITING)
    chunks = set(WAITING.chunks) - set(RUNNING.chunks)  # the running prompt has brought the others
    assert chunks
    until(lambda: store.backend.tier_hits.far == before.far + len(chunks))
    assert store.backend.wait(10)
    assert waiting.seen.empty()

    running.let_go()
    assert waiting.wait().tokens == expected
    after = store.backend.tier_hits
    assert after.far == before.far + len(chunks)
    assert waiting.figures.hits == len(WAITING.chunks)
    engine.close()

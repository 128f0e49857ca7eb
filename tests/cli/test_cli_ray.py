"""`blend precompute --ray` on a real Ray of this machine; a worker is killed in the middle."""

import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from blend_process import CHUNKS, caches, one_line

from blend.errors import ConfigError
from blend.shards import ray_cluster

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'kvblend[ray]'")
# No token in the home directory; workers that are not the last in the queue for the processor, and are not killed because
# something else on this machine takes its memory.
QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}


def writers(*stores: Path) -> list[int]:
    """Processes of workers that are writing a cache now."""
    names = [path.name.split("-") for store in stores for path in store.rglob("tmp/.*.tmp")]
    found = [int(parts[1]) for parts in names if len(parts) > 2]
    return [pid for pid in found if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")]


@needs_ray
def test_a_worker_killed_in_the_middle_is_restarted(lots, undisturbed, tmp_path):
    """Into a store that all read, past a disk tier of the worker's own."""
    lots.store, mounted, cached = None, tmp_path / "mounted", tmp_path / "elsewhere"
    env = QUIET | {"KVBLEND_STORE": f"file://{mounted}", "XDG_CACHE_HOME": str(cached)}
    env |= {"KVBLEND_STORE_CACHE": str(tmp_path / "head")}
    running = lots.start("precompute", "lots", *CHUNKS, "--json", "--ray-workers", "1", "--ray", env=env)
    found: list[int] = []

    def writing() -> bool:
        if "Ray cannot be started on this machine" in running.err:
            pytest.skip(f"Ray itself does not start here: {one_line(running.err)}")
        found[:] = writers(mounted, cached)
        return bool(caches(mounted)) and bool(found)

    try:
        running.until(writing, timeout=500)
        os.kill(found[0], signal.SIGKILL)
    except BaseException:
        running.send(signal.SIGTERM)  # Ray must not stay behind
        raise
    result = running.wait(timeout=500)
    assert result.code == 0, result.err
    assert "Computing caches, on Ray: " in result.err
    assert caches(mounted) == caches(undisturbed.store / "kv")
    assert result.json["computed"] == len(caches(mounted))
    assert list((cached / "kvblend" / "replicas").iterdir())


@needs_ray
def test_an_address_where_no_cluster_answers(blend, documents):
    result = blend("precompute", documents, "--ray=127.0.0.1:9", env=QUIET)
    assert "no Ray cluster answers at 127.0.0.1:9" in result.refused(2)


def test_without_ray_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install .*ray"), ray_cluster("", None, on_gpu=False):
        pass

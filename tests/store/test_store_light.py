"""Looking at what a store holds loads no torch."""

from __future__ import annotations

import subprocess
import sys

LOOK = """
import sys
from blend.store import open_store
store = open_store(sys.argv[1], budget_bytes=10**9)
assert store.stats().entries == 2
assert len(list(store.keys())) == 2
assert list(store.artifacts()) == ["map"] and store.read_artifact("map") == b"content"
assert store.namespaces()["abc"] == {"model": "tiny"}
before = store.generation
store.write_artifact("map", b"other")
store.describe("abd", {})
with store.writing():
    store.delete_artifact("map")
assert store.generation != before
store.delete(next(store.keys()))
assert store.prune((), next(store.keys()).namespace) == 1
assert open_store("memory:").stats().entries == 0
print([name for name in ("torch", "numpy", "transformers", "safetensors") if name in sys.modules])
"""


def test_looking_at_a_store_loads_no_torch(tmp_path, key, cache):
    from blend.store import open_store

    store = open_store(tmp_path / "store")
    store.put(key(1), cache())
    store.put(key(2), cache())
    store.write_artifact("map", b"content")
    store.describe("abc", {"model": "tiny"})
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(tmp_path / "store")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"

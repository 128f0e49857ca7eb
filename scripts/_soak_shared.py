"""Steps of a soak of stores that are about several machines: indexes that are published and fetched, and the lease."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import _soak_caches
import _soak_named
from _soak_faults import Fault
from _soak_named import write_artifact
from _soak_scene import MOST, Scene, Step, Wrong
from blend.corpora import index_dir
from blend.errors import StoreChangedError, StoreError
from blend.store import lease
from blend.store.names import INDEXES
from retrieval.errors import IndexMissingError
from retrieval.generations import Generation, generation_files, read_generation, write_generation, write_lock

LEASE_S, ASLEEP_S, WAIT_S = 1.5, 0.15, 6.0
_PLACE = f"{INDEXES}_/"
_MANIFEST = _PLACE + "manifest.json"


def publish(scene: Scene) -> None:
    """A precompute replaces the corpus, for the one that it began with."""
    sharing, root = scene.machine.sharing, scene.machine.root
    if sharing is None or root is None:
        return
    directory = index_dir(root, "")
    before, known = scene.witness.backend.read(_MANIFEST, MOST), _known(root)
    number = scene.draws.randrange(8)
    with write_lock(directory):
        write_generation(directory, Generation("soak", 1, b"chunks %d" % number, b"vectors %d" % number))
    manifest, files = generation_files(directory)
    contents = {_PLACE + name: path.read_bytes() for name, path in files.items()}
    try:
        scene.unpublished.add(root)
        with scene.ledger.writing({**contents, _MANIFEST: scene.sealed(_MANIFEST, manifest)}):
            sharing.publish("")
        scene.unpublished.discard(root)
    except StoreChangedError:
        scene.counts["corpora that another machine had changed"] += 1
        if scene.well and known == before:
            raise Wrong("a corpus was refused though nobody else has published one") from None


def fetch(scene: Scene) -> None:
    """What all have, or while the bucket is not well what was here, is here whole."""
    sharing, root = scene.machine.sharing, scene.machine.root
    if sharing is None or root is None:
        return
    sharing.refresh(now=True)
    try:
        generation = read_generation(index_dir(root, ""))
    except IndexMissingError:
        if _known(root) is not None:
            raise Wrong("the index that was fetched is gone") from None
        return
    manifest, files = generation_files(index_dir(root, ""))
    may_be_older = scene._replace(well=scene.well and root not in scene.unpublished)
    may_be_older.require_known(_MANIFEST, scene.sealed(_MANIFEST, manifest))
    if generation.chunks.split()[1] != generation.vectors.split()[1] or len(files) != 2:
        raise Wrong("an index is of two generations")


def _known(root: Path) -> bytes | None:
    path = root / "shared" / "_.manifest"
    return path.read_bytes() if path.exists() else None


def under_the_lease(scene: Scene) -> None:
    """What only one process does at a time."""
    far = scene.store.backend.tiers.far  # type: ignore[attr-defined]
    with lease.leased(far, lease_s=LEASE_S, wait_s=WAIT_S):
        write_artifact(scene)


def lease_stolen(scene: Scene) -> None:
    """The machine sleeps for longer than its lease lasts, and another one takes it: then this one writes no more."""
    far, witness = scene.store.backend.tiers.far, scene.witness.backend.tiers.far  # type: ignore[attr-defined]
    with _asleep(), lease.leased(far, lease_s=ASLEEP_S, wait_s=WAIT_S):
        with lease.leased(witness, lease_s=ASLEEP_S, wait_s=60):
            write_artifact(scene._replace(machine=scene.machine._replace(store=scene.witness)))
        time.sleep(ASLEEP_S)
        try:
            write_artifact(scene)
        except StoreError:
            return
        raise Wrong("a machine has written though it had lost its lease")


@contextmanager
def _asleep() -> Iterator[None]:
    """No lease is written anew."""
    keep = lease._Lease.keep
    lease._Lease.keep = lambda self, done: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        lease._Lease.keep = keep  # type: ignore[method-assign]


ALL_STEPS = (
    *_soak_caches.STEPS,
    *_soak_named.STEPS,
    Step(publish, 9, 2),
    Step(fetch, 5, 2),
    Step(under_the_lease, 16),
    Step(lease_stolen, 16),
)


def _steps(*names: str) -> tuple[Step, ...]:
    return tuple(step for step in ALL_STEPS if step.do.__name__ in names)


ASKING = {
    Fault("disk", ""): _steps("read", "read_many"),
    Fault("redis", ""): _steps("put", "read", "read_many", "delete"),
    Fault("redis", "evicts"): _steps("read", "read_many"),
    Fault("bucket", "stale"): _steps("listing", "prune", "forget_copies", "fetch"),
    Fault("bucket", "full"): _steps("put", "publish", "write_artifact", "swap", "change_pin"),
}
"""Steps that ask what is wrong, where few do; of a place, for whatever else is wrong with it, under no kind."""

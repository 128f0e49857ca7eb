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
from blend.store import backend as lease
from blend.store.backend import INDEXES
from blend_retrieval.errors import IndexMissingError
from blend_retrieval.generations import Generation, generation_files, read_generation, write_generation, write_lock

LEASE_S, ASLEEP_S, WAIT_S = 2.0, 0.5, 8.0
_PLACE = f"{INDEXES}_/"
_MANIFEST = _PLACE + "manifest.json"


def publish(scene: Scene) -> None:
    """A precompute replaces the corpus, for the one that it began with; now and then another machine is quicker."""
    sharing, root = scene.machine.sharing, scene.machine.root
    if sharing is None or root is None:
        return
    sharing.refresh(now=True)
    was = sharing.begun_with("")
    if scene.draws.random() < 0.3:
        _put(scene, _generation(scene, root / "another"))
    now = scene.witness.backend.read(_MANIFEST, MOST)
    if was is None:
        scene.unpublished.add(root)
    contents = _generation(scene, index_dir(root, ""))
    too_late = now is not None and now not in (was, contents[_MANIFEST])
    try:
        with scene.ledger.writing(contents):
            sharing.publish("", was)
    except StoreChangedError:
        scene.counts["corpora that another machine had changed"] += 1
        if scene.well and not too_late:
            raise Wrong("a corpus was refused though nobody else has published one") from None
        return
    scene.unpublished.discard(root)
    if too_late:
        raise Wrong("a corpus was published over that of another machine")


def _generation(scene: Scene, directory: Path) -> dict[str, bytes]:
    """One of some that becomes the current one there, as it is to be published."""
    number = scene.draws.randrange(8)
    with write_lock(directory):
        write_generation(directory, Generation("soak", 1, b"chunks %d" % number, b"vectors %d" % number))
    manifest, files = generation_files(directory)
    contents = {_PLACE + name: path.read_bytes() for name, path in files.items()}
    return {**contents, _MANIFEST: scene.sealed(_MANIFEST, manifest)}


def _put(scene: Scene, contents: dict[str, bytes]) -> None:
    """By another machine."""
    with scene.ledger.writing(contents):
        for name, content in contents.items():
            scene.witness.backend.put(name, [content])


def fetch(scene: Scene) -> None:
    """What all have, or while the bucket is not well what was here, is here whole."""
    sharing, root = scene.machine.sharing, scene.machine.root
    if sharing is None or root is None:
        return
    sharing.refresh(now=True)
    try:
        generation = read_generation(index_dir(root, ""))
    except IndexMissingError:
        if sharing.begun_with(""):
            raise Wrong("the index that was fetched is gone") from None
        return
    manifest, files = generation_files(index_dir(root, ""))
    may_be_older = scene._replace(well=scene.well and root not in scene.unpublished)
    may_be_older.require_known(_MANIFEST, scene.sealed(_MANIFEST, manifest))
    if generation.chunks.split()[1] != generation.vectors.split()[1] or len(files) != 2:
        raise Wrong("an index is of two generations")


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
    Step(publish, 14, 2),
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

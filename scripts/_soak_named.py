"""Steps of a soak of stores that are about small things under names: artifacts, descriptions, notes that are exchanged."""

from __future__ import annotations

from _soak_machines import key
from _soak_scene import MOST, Scene, Step, Wrong
from blend.store.backend import GENERATION, artifact_name, description_name
from blend.store.seal import pack_description

_ARTIFACTS = ("surrogate-1", "correction-1")
_NOTE = "sources/soak"


def write_artifact(scene: Scene) -> None:
    """In place of the last one; all are told."""
    name, content, far = scene.draws.choice(_ARTIFACTS), scene.anything(), scene.witness.backend.tiers.far  # type: ignore[attr-defined]
    before = far.read(GENERATION, MOST)
    with scene.ledger.writing({artifact_name(name): scene.sealed(name, content)}):
        scene.store.write_artifact(name, content)
    if far.read(GENERATION, MOST) == before:
        raise Wrong(f"{name} was written, and nobody is told")


def read_artifact(scene: Scene) -> None:
    """As it is; while the bucket is not well as it was."""
    name = scene.draws.choice(_ARTIFACTS)
    content = scene.store.read_artifact(name)
    scene.require_known(artifact_name(name), None if content is None else scene.sealed(name, content))


def describe(scene: Scene) -> None:
    """A precompute says in words what a namespace is."""
    space, words = key(0).namespace, {"model": scene.anything().decode()}
    with scene.ledger.writing({description_name(space): pack_description(words)}):
        scene.store.describe(space, words)
    if scene.well and scene.store.namespaces().get(space) != words:
        raise Wrong("a description is not what was written")


def swap(scene: Scene) -> None:
    """A note is exchanged for the one that was read."""
    raw, content = scene.store.read_manifest(_NOTE)
    if content is not None or scene.well:
        scene.require_known(_NOTE, raw)
    new = scene.anything()
    with scene.ledger.writing({_NOTE: scene.sealed(_NOTE, new)}, sure=False):
        done = scene.store.swap_manifest(_NOTE, new, raw)
    if done:
        scene.ledger.learn(_NOTE, scene.sealed(_NOTE, new))
    elif scene.well:
        raise Wrong("a conditional put was refused though nobody else has put anything")


def swap_too_late(scene: Scene) -> None:
    """Another machine has exchanged the note since it was read."""
    raw, _ = scene.store.read_manifest(_NOTE)
    other = scene.anything()
    with scene.ledger.writing({_NOTE: scene.sealed(_NOTE, other)}):
        scene.witness.put_manifest(_NOTE, other)
    if scene.store.swap_manifest(_NOTE, scene.anything(), raw):
        raise Wrong("a conditional put has replaced what another machine had put meanwhile")


STEPS = (
    Step(write_artifact, 5),
    Step(read_artifact, 2),
    Step(describe, 6),
    Step(swap, 6),
    Step(swap_too_late, 6),
)

"""Steps of a soak of stores that are about caches: put, read, listed, pinned, removed."""

from __future__ import annotations

import torch

from _soak_machines import KEYS, entry, key, kv
from _soak_scene import MOST, Scene, Step, Wrong
from blend.errors import EntryDamagedError
from blend.store import ChunkReader
from blend.store.admin import PINNED, pin_cache, remove_copies
from blend.store.backend import CACHES, PINS


def put(scene: Scene) -> None:
    """An entry."""
    put_one(scene, scene.draws.randrange(KEYS))


def put_one(scene: Scene, number: int) -> None:
    """That entry."""
    name, content = entry(number, scene.secret)
    with scene.ledger.writing({name: content}):
        scene.store.put(key(number), kv(number))


def read(scene: Scene) -> None:
    """An entry, its layers in any order."""
    number, name, _ = scene.entry()
    _judge(scene, number, name, scene.store.open(key(number)))


def put_missing(scene: Scene) -> None:
    """What is not there."""
    for number in range(KEYS):
        if not scene.ledger.is_there(entry(number, scene.secret)[0]):
            put_one(scene, number)


def read_many(scene: Scene) -> None:
    """Entries, as those of a prompt."""
    read_all(scene, scene.draws.sample(range(KEYS), 5))


def read_all(scene: Scene, numbers: list[int]) -> None:
    """These at the same time."""
    readers = scene.store.open_many([key(number) for number in numbers])
    try:
        for number, reader in zip(numbers, readers, strict=True):
            _judge(scene, number, entry(number, scene.secret)[0], reader)
    finally:
        for reader in readers:
            if isinstance(reader, ChunkReader):
                reader.close()


def _judge(scene: Scene, number: int, name: str, reader: ChunkReader | EntryDamagedError | None) -> None:
    try:
        _compare(scene, number, name, reader)
    except EntryDamagedError:
        if scene.ledger.is_there(name):
            raise
        scene.counts["damaged copies of what is gone"] += 1


def _compare(scene: Scene, number: int, name: str, reader: ChunkReader | EntryDamagedError | None) -> None:
    if isinstance(reader, EntryDamagedError):
        raise reader
    if reader is None:
        if scene.ledger.is_there(name):
            raise Wrong(f"entry {number} was acknowledged and is missing")
        return
    scene.ledger.may(name)
    with reader:
        for index in scene.draws.sample(range(2), 2):
            keys, values = reader.layer(index)
            if not (torch.equal(keys, kv(number).keys[index]) and torch.equal(values, kv(number).values[index])):
                raise Wrong(f"layer {index} of entry {number} is not what was put")
            scene.counts["layers compared"] += 1


def prefetch(scene: Scene) -> None:
    """Entries come nearer, or do not."""
    before = set(scene.machine.asked.local)  # what lies on the disk already is not read
    scene.store.prefetch(key(number) for number in scene.draws.sample(range(KEYS), 3))
    scene.store.backend.wait(MOST)  # type: ignore[attr-defined]
    scene.machine.asked.local.intersection_update(before)


def listing(scene: Scene) -> None:
    """All entries."""
    found = {name for page in scene.store.backend.names(CACHES) for name in page}
    _require_between(scene, found, CACHES)


def held(scene: Scene) -> None:
    """Which of all entries there are; bytes that were changed on the way make them damaged."""
    there = scene.store.held(map(key, range(KEYS)))
    found = {entry(number, scene.secret)[0] for number in range(KEYS) if key(number) in there}
    _require_between(scene, found, CACHES)


def _require_between(scene: Scene, found: set[str], prefix: str) -> None:
    there, may = scene.ledger.certain(prefix)
    if scene.lists_truly and not there <= found <= may:
        raise Wrong(f"{prefix} lacks {sorted(there - found)} and has {sorted(found - may)} too much")


def delete(scene: Scene) -> None:
    """An entry."""
    number, name, _ = scene.entry()
    with scene.ledger.writing({name: None}):
        scene.store.delete(key(number))


def prune(scene: Scene) -> None:
    """Up to two entries, but for pinned ones."""
    going = scene.draws.sample(range(KEYS), 2)
    pins = {number: scene.ledger.may(PINS + key(number).digest) for number in going}
    gone = {entry(number, scene.secret)[0]: None for number in going if pins[number] != {PINNED}}
    sure = scene.lists_truly and all(len(may) == 1 for may in pins.values())
    scene.ledger.touched |= dict.fromkeys(entry(number, scene.secret)[0] for number in going)
    with scene.ledger.writing(gone, sure=sure):
        scene.store.prune([key(number) for number in range(KEYS) if number not in going], key(0).namespace)


def change_pin(scene: Scene) -> None:
    """An entry is pinned, or let go."""
    number, on = scene.draws.randrange(KEYS), scene.draws.random() < 0.5
    digest = key(number).digest
    with scene.ledger.writing({PINS + digest: PINNED if on else None}):
        pin_cache(scene.store.backend, digest, on=on)


def restore(scene: Scene) -> None:
    """Another machine has removed an entry; copies of it that are near are given back."""
    number, name, content = scene.entry()
    with scene.ledger.writing({name: None}):
        scene.witness.delete(key(number))
    with scene.ledger.writing({name: content}, sure=False):
        if scene.store.restore([key(number)]):
            scene.ledger.learn(name, content)


def forget_copies(scene: Scene) -> None:
    """Copies of what is gone go."""
    remove_copies(scene.store.backend)


DELETE = 3  # is it there, away with it; and from the server in memory
STEPS = (
    Step(put, 3, 6),
    Step(read, 3, 4),
    Step(read_many, 5, 4),
    Step(prefetch, 5, 2),
    Step(listing, 1),
    Step(held, 3),
    Step(delete, 1 + DELETE),
    Step(prune, 5 + 2 * DELETE),
    Step(change_pin, 1 + DELETE),
    Step(restore, 4),
    Step(forget_copies, 6),
)

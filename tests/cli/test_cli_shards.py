"""`blend precompute --shard`: whoever computes what, whenever, and whoever is killed, the corpus is that of one process."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from blend_process import Blend, entries, one_line

CHUNKS = ("--chunk-tokens", "32")


def contents(store: Path) -> dict[str, bytes]:
    """Every byte of caches, artifacts and index by name; left out is what says when and how fast they were made."""
    names = {path.relative_to(store): path for path in store.rglob("*") if path.is_file()}
    kept = {
        name: path
        for name, path in names.items()
        if name.parts[1] not in ("generation", ".lock", ".writing", "namespaces")
    }
    return {str(name): path.read_bytes() for name, path in kept.items()}


@pytest.fixture(scope="session")
def parcels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of documents, some eighty chunks of 32 tokens."""
    folder = tmp_path_factory.mktemp("parcels")
    for number in range(4):
        lines = (f"Lot {number}.{line} holds {number * line} crates of slate and {line} bells." for line in range(20))
        (folder / f"{number}.md").write_text("\n\n".join(lines))
    return folder


@pytest.fixture(scope="session")
def undisturbed(
    server: subprocess.Popen[str], model: Path, parcels: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """What one process makes of them."""
    folder = tmp_path_factory.mktemp("undisturbed")
    alone = Blend(server, folder, model, folder / "store")
    assert alone("precompute", parcels, *CHUNKS).code == 0
    return contents(folder / "store")


@pytest.fixture
def lots(blend: Blend, parcels: Path, tmp_path: Path) -> Blend:
    """The command line over an empty store, with a copy of the documents in "lots" beside it."""
    shutil.copytree(parcels, tmp_path / "lots")
    return blend


def shard(share: str) -> tuple[str, ...]:
    return ("precompute", "lots", *CHUNKS, "--shard", share, "--json")


def all_caches(store: Path) -> int:
    return len(entries(store)) + len(entries(store, "contextual"))


def test_shards_in_any_order_make_the_corpus_of_one_process(lots: Blend, undisturbed: dict[str, bytes]) -> None:
    first = lots(*shard("3/3")).json
    assert (first["shards_to_come"], first["finished"]) == ([1, 2], False)
    assert not any("correction" in artifact["name"] for artifact in lots("store", "--json").json["artifacts"])
    second = lots(*shard("1/3")).json
    assert second["shards_to_come"] == [2]
    third = lots("precompute", "lots", *CHUNKS, "--shard", "2/3")
    assert "All shards are done: the corpus is complete." in third.out
    assert "Computing caches, shard 2/3: " in third.err
    assert contents(lots.store) == undisturbed
    counts = [first["computed"], second["computed"]]
    assert sum(counts) == pytest.approx(2 / 3 * all_caches(lots.store), rel=0.1)
    assert first["tokens"] == pytest.approx(second["tokens"], rel=0.05)


def test_the_answers_are_those_of_one_process(lots: Blend, undisturbed: dict[str, bytes]) -> None:
    for share in ("2/2", "1/2"):
        assert lots(*shard(share)).code == 0
    ask = ("answer", "How many crates are in lot 7?", "--json", "--max-new-tokens", "8")
    mine = lots(*ask).json
    alone = lots.at(lots.folder / "alone")
    for name, content in undisturbed.items():
        place = alone.store / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    theirs = alone(*ask).json
    assert mine["answer"] == theirs["answer"]
    assert mine["chunks"] == theirs["chunks"]
    assert all(chunk["hit"] for chunk in mine["chunks"])


def test_a_shard_killed_in_the_middle_is_taken_up_again(lots: Blend, undisturbed: dict[str, bytes]) -> None:
    running = lots.start(*shard("1/2"))
    running.until(lambda: all_caches(lots.store) >= 20).send(signal.SIGKILL)
    assert running.wait().code == -signal.SIGKILL
    stored = all_caches(lots.store)
    assert lots(*shard("2/2")).json["shards_to_come"] == [1]
    again = lots(*shard("1/2")).json
    assert again["finished"]
    assert again["reused"] == stored
    assert contents(lots.store) == undisturbed


def test_all_at_once_and_one_of_them_twice(lots: Blend, undisturbed: dict[str, bytes]) -> None:
    running = [lots.start(*shard(share)) for share in ("1/2", "2/2", "2/2")]
    results = [one.wait() for one in running]
    assert [result.code for result in results] == [0, 0, 0], results
    assert sum(result.json["finished"] for result in results) == 1
    assert contents(lots.store) == undisturbed


def test_a_kill_while_the_last_one_finishes(lots: Blend, undisturbed: dict[str, bytes]) -> None:
    """Everything is computed and noted as done, and then nobody measures the KV correction."""
    lots(*shard("1/2"))
    running = lots.start(*shard("2/2"))
    order = lots.store / "kv" / "artifacts"
    running.until(lambda: any(b'"2/2"' in path.read_bytes() for path in order.glob("work-*"))).send(signal.SIGKILL)
    assert running.wait().code == -signal.SIGKILL
    assert not list(order.glob("correction-*"))
    again = lots(*shard("1/2")).json
    assert (again["computed"], again["finished"]) == (0, True)
    assert contents(lots.store) == undisturbed


def test_a_second_round_and_an_edit_cost_what_they_cost_one_process(lots: Blend) -> None:
    for share in ("1/2", "2/2", "1/2"):
        found = lots(*shard(share)).json
    assert (found["computed"], found["added"], found["shards_to_come"]) == (0, 0, [2])
    place = lots.folder / "lots" / "3.md"
    place.write_text(place.read_text().replace("Lot 3.7 holds", "Lot 3.7 hid"))
    runs = [lots(*shard(share)).json for share in ("1/2", "2/2")]
    assert 1 <= runs[0]["added"] <= 2
    assert sum(run["computed"] for run in runs) == 2 * runs[0]["added"]
    assert [run["finished"] for run in runs] == [False, True]
    assert not [one for one in lots("store", "--json").json["artifacts"] if one["name"].startswith("work-")]


@pytest.mark.parametrize("share", ["0/2", "3/2", "1", "a/b", "1/99999", "-1/2", "1/2/3"])
def test_what_is_no_share(blend: Blend, documents: Path, share: str) -> None:
    result = blend("precompute", documents, f"--shard={share}")
    assert result.code == 2
    assert "such as 2/4" in one_line(result.err)
    assert not blend.store.exists()


def test_quick_is_for_one_process(blend: Blend, documents: Path) -> None:
    result = blend("precompute", documents, "--shard", "1/2", "--quick")
    assert result.code == 2
    assert "leave one of them out" in one_line(result.err)

"""`blend precompute --shard`: whoever computes what, whenever, and whoever is killed, the corpus is that of one process."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from blend_process import Blend, one_line
from undisturbed import ASK, CHUNKS, Undisturbed, all_caches, contents


def shard(share: str) -> tuple[str, ...]:
    return ("precompute", "lots", *CHUNKS, "--shard", share, "--json")


def test_shards_in_any_order_make_the_corpus_of_one_process(lots: Blend, undisturbed: Undisturbed) -> None:
    first = lots(*shard("3/3")).json
    assert (first["shards_to_come"], first["finished"]) == ([1, 2], False)
    assert not list((lots.store / "kv" / "artifacts").glob("correction-*"))
    second = lots(*shard("1/3")).json
    assert second["shards_to_come"] == [2]
    third = lots("precompute", "lots", *CHUNKS, "--shard", "2/3")
    assert "All shards are done: the corpus is complete." in third.out
    assert "Computing caches, shard 2/3: " in third.err
    assert contents(lots.store) == undisturbed.contents
    assert abs(first["tokens"] - second["tokens"]) <= 1024  # in whole forward passes
    answer = lots(*ASK).json
    for what in ("answer", "chunks"):
        assert answer[what] == undisturbed.answer[what]
    assert all(chunk["hit"] for chunk in answer["chunks"])


def test_a_shard_killed_in_the_middle_and_again_while_it_finishes(lots: Blend, undisturbed: Undisturbed) -> None:
    running = lots.start(*shard("1/2"))
    running.until(lambda: all_caches(lots.store) >= 5).send(signal.SIGKILL)
    assert running.wait().code == -signal.SIGKILL
    stored = all_caches(lots.store)
    other = lots(*shard("2/2")).json
    assert other["shards_to_come"] == [1]
    # Everything is computed and noted as done, and then nobody measures the KV correction.
    running, artifacts = lots.start(*shard("1/2")), lots.store / "kv" / "artifacts"
    running.until(lambda: any(b'"1/2"' in path.read_bytes() for path in artifacts.glob("work-*"))).send(signal.SIGKILL)
    assert running.wait().code == -signal.SIGKILL
    assert not list(artifacts.glob("correction-*"))
    assert all_caches(lots.store) > stored + other["computed"]
    again = lots(*shard("2/2")).json
    assert (again["computed"], again["finished"]) == (0, True)
    assert contents(lots.store) == undisturbed.contents


def test_all_at_once_one_of_them_twice_and_then_an_edit(lots: Blend, undisturbed: Undisturbed) -> None:
    running = [lots.start(*shard(share)) for share in ("1/2", "2/2", "2/2")]
    results = [one.wait() for one in running]
    assert [result.code for result in results] == [0, 0, 0], results
    assert sum(result.json["finished"] for result in results) == 1
    assert contents(lots.store) == undisturbed.contents
    place = lots.folder / "lots" / "3.md"
    place.write_text(place.read_text().replace("Lot 3.7 holds", "Lot 3.7 hid"))
    runs = [lots(*shard(share)).json for share in ("1/2", "2/2")]
    assert 1 <= runs[0]["added"] <= 2
    assert sum(run["computed"] for run in runs) == 2 * runs[0]["added"]
    assert [run["finished"] for run in runs] == [False, True]
    assert not list((lots.store / "kv" / "artifacts").glob("work-*"))


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

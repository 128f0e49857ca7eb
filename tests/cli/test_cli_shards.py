"""`blend precompute --shard`: in whatever order shares run, and whichever is killed, the corpus is that of one process."""

import signal
from pathlib import Path

import pytest
from blend_process import ASK, CHUNKS, all_caches, files_of

from blend.config import Share
from blend.errors import ConfigError
from blend.types import CacheIdentity


def shard(share: str) -> tuple[str, ...]:
    return ("precompute", "lots", *CHUNKS, "--shard", share, "--json")


def corrections(store: Path) -> list[Path]:
    return list((store / "kv" / "artifacts").glob("correction-*"))


def test_shards_in_any_order_make_the_corpus_of_one_process(lots, undisturbed):
    first = lots(*shard("3/3")).json
    assert (first["shards_to_come"], first["finished"]) == ([1, 2], False)
    assert not corrections(lots.store)
    second = lots(*shard("1/3")).json
    assert second["shards_to_come"] == [2]
    third = lots("precompute", "lots", *CHUNKS, "--shard", "2/3")
    assert "All shards are done: the corpus is complete." in third.out
    assert "Computing caches, shard 2/3: " in third.err
    assert files_of(lots.store) == files_of(undisturbed.store)
    answer, expected = lots(*ASK).json, undisturbed(*ASK).json
    assert (answer["answer"], answer["chunks"]) == (expected["answer"], expected["chunks"])
    assert all(chunk["hit"] for chunk in answer["chunks"])


def test_a_shard_killed_in_the_middle_and_another_before_the_correction(lots, undisturbed):
    running = lots.start(*shard("1/2"))
    running.until(lambda: all_caches(lots.store) >= 5).send(signal.SIGKILL)
    assert running.wait().code == -signal.SIGKILL
    other = lots(*shard("2/2")).json
    assert other["shards_to_come"] == [1]
    running, whole = lots.start(*shard("1/2")), all_caches(undisturbed.store)
    running.until(lambda: all_caches(lots.store) == whole).send(signal.SIGKILL)
    assert running.wait().code == -signal.SIGKILL
    for correction in corrections(lots.store):  # it may have been quicker than the signal
        correction.unlink()
    again = lots(*shard("2/2")).json
    assert (again["computed"], again["finished"]) == (0, True)
    assert files_of(lots.store) == files_of(undisturbed.store)


def test_all_at_once_one_of_them_twice_and_then_an_edit(lots, undisturbed):
    running = [lots.start(*shard(share)) for share in ("1/2", "2/2", "2/2")]
    results = [one.wait() for one in running]
    assert [result.code for result in results] == [0, 0, 0], results
    assert any(result.json["finished"] for result in results)
    assert files_of(lots.store) == files_of(undisturbed.store)
    place = lots.folder / "lots" / "3.md"
    place.write_text(place.read_text().replace("Lot 3.7 holds", "Lot 3.7 hid"))
    runs = [lots(*shard(share)).json for share in ("1/2", "2/2")]
    assert 1 <= runs[0]["added"] <= 2
    assert sum(run["computed"] for run in runs) == 2 * runs[0]["added"]
    assert runs[1]["finished"]


def test_a_plain_run_computes_what_shards_left(lots, undisturbed):
    done = lots(*shard("1/4")).json["computed"]
    rest = lots("precompute", "lots", *CHUNKS, "--json").json
    assert rest["reused"] == done > 0
    assert files_of(lots.store) == files_of(undisturbed.store)


@pytest.mark.parametrize("of", [1, 2, 7])
def test_shares_are_a_partition(of):
    keys = [CacheIdentity("tiny", "float32", (1,)).key((token,)) for token in range(200)]
    numbers = [[number for number in range(1, of + 1) if Share(number, of).holds(key)] for key in keys]
    assert all(len(found) == 1 for found in numbers)
    assert {found[0] for found in numbers} == set(range(1, of + 1))


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/99999", "-1/2", "1/2/3", "", "/", "²/3", "1/10001"])
def test_what_is_no_share(text):
    with pytest.raises(ConfigError, match="such as 2/4"):
        Share.parse(text)

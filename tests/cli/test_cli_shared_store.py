"""`--store` with an address, and what `blend store` shows and does over every tier."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from blend_process import ANSWER, CHUNKS, Blend, caches, one_line

from tests.store.reading import flip
from tests.store.servers import given_bucket, redis_address


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """Where the store of `machine` lies."""
    if given_bucket(tmp_path):
        pytest.skip("KVBLEND_TEST_BUCKET is set: the store has no files that could be looked at")
    return tmp_path / "mounted"


@pytest.fixture
def machine(blend: Blend, tmp_path: Path) -> Callable[[str], Blend]:
    """Calls of `blend` on a machine of that name, over one store that all of them mount, or see `far_stores`."""
    address = given_bucket(tmp_path) or f"file://{tmp_path / 'mounted'}"
    return lambda name: blend.shared(address, tmp_path / name)


def test_two_machines_at_the_same_time_make_the_corpus_of_one(machine, lots, undisturbed, mounted):
    begun = [machine(f"of {n}").start("precompute", "lots", *CHUNKS, "--shard", f"{n}/2", "--json") for n in (1, 2)]
    done = [one.wait(300) for one in begun]
    assert [one.code for one in done] == [0, 0], done
    assert any(one.json["finished"] for one in done)
    assert all(one.json["computed"] for one in done)
    assert caches(mounted) == caches(undisturbed.store / "kv")
    again = machine("a third")("precompute", "lots", *CHUNKS, "--json").json
    assert (again["computed"], again["added"], again["removed"]) == (0, 0, 0)


def test_verify_finds_damage_in_any_tier(machine, documents, mounted):
    one = machine("one")
    one.precompute(documents)
    one.done("store", "verify")
    file = next((mounted / "objects").rglob("*.safetensors"))
    flip(file, -1)
    found = one("store", "verify")
    assert (found.code, found.out.startswith("far: store entry")) == (7, True)
    assert "1 of " in one_line(found.err)
    assert "1 damaged and removed" in one("store", "verify", "--delete").out
    assert not file.exists()
    one.done("store", "verify")


def test_what_a_tier_that_is_down_still_has_is_said(machine, documents, tmp_path):
    one, two = machine("one"), machine("two")
    one.precompute(documents)

    def tiers() -> dict[str, int]:
        return {row["tier"]: row["entries"] for row in one("store", "stats", "--json").json["tiers"]}

    before = tiers()["local"]
    assert 0 < before <= tiers()["far"] == len(one("store", "ls").out.splitlines())
    assert len(one("store", "ls", "--tier", "local").out.splitlines()) == before
    assert "has no tier 'hot': name far or local" in one("store", "ls", "--tier", "hot").refused(2)
    removed = two("store", "prune", "--older-than", "0", "--store-hot", "redis://127.0.0.1:1/0")
    assert removed.code == 7
    assert "caches removed" in removed.out
    assert "may still be in redis://127.0.0.1:1/0" in one_line(removed.err)
    assert "run the same command again" in one_line(removed.err)
    copies = f"{before:,} copies in nearer tiers of caches that were gone"
    assert f"{copies} would go" in one("store", "prune", "--older-than", "0", "--dry-run").out
    assert f"{copies} removed" in one("store", "prune", "--unused").out
    assert tiers() == {"far": 0, "local": 0}


def test_a_server_that_is_not_there_is_one_line(blend, tmp_path):
    away = blend.shared("redis://127.0.0.1:1/0", tmp_path / "near")
    assert "see that it is up" in away.done("store", "stats").out
    assert "see that it is up" in away(*ANSWER).refused(7)


@pytest.mark.parametrize("server", ["mounted", "redis"])
def test_messages_name_the_address_and_not_the_local_copy(blend, documents, tmp_path, server):
    address = f"{redis_address(9)}/{tmp_path.name}" if server == "redis" else f"file://{tmp_path / 'mounted'}"
    copy = tmp_path / "copy"
    machine = blend.shared(address, copy)
    outputs = {
        "nothing there": machine(*ANSWER),
        "precompute": machine.done("precompute", documents / "quarry.md", *CHUNKS),
        "model taken": replace(machine, model="").answer(),
        "stats": machine.done("store", "stats"),
        "no such corpus": machine(*ANSWER, "--corpus", "nowhere"),
        "another embedder": machine(*ANSWER, "--embedder", "words"),
    }
    next((copy / "index").glob("chunks-*")).write_bytes(b"damaged")
    outputs["damaged"] = machine(*ANSWER)
    shown = {name: re.sub(r"\s+", "", output.out + output.err) for name, output in outputs.items()}
    lists_tiers, names_no_store = "stats", "another embedder"
    assert [name for name, text in shown.items() if str(copy) in text] == [lists_tiers]
    named = {name for name, text in shown.items() if address in text}
    assert named >= shown.keys() - {lists_tiers, names_no_store}

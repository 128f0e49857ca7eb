"""`--store` with an address, and what `blend store` shows and does over every tier."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from blend_process import CHUNKS as SMALL
from blend_process import Blend, Result, Running, Undisturbed, one_line

from tests.store.reading import flip
from tests.store.servers import given_bucket

CHUNKS = ("--chunk-tokens", "64")


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """Where the store of `machine` lies."""
    if given_bucket(tmp_path):
        pytest.skip("KVBLEND_TEST_BUCKET is set: the store has no files that could be looked at")
    return tmp_path / "mounted"


@pytest.fixture
def machine(blend: Blend, tmp_path: Path):
    """Calls of `blend` on a machine of that name, over one store that all of them mount, or see `far_stores`."""
    address = given_bucket(tmp_path) or f"file://{tmp_path / 'mounted'}"

    def of(name: str) -> Machine:
        blend.store = None
        store = {"KVBLEND_STORE": address, "KVBLEND_STORE_CACHE": str(tmp_path / name)}
        return Machine(blend, store)

    return of


class Machine(NamedTuple):
    """Calls of `blend` with these variables."""

    blend: Blend
    env: dict[str, str]

    def start(self, *arguments: str | Path, **more: str) -> Running:
        return self.blend.start(*arguments, env=self.env | more)

    def __call__(self, *arguments: str | Path, **more: str) -> Result:
        return self.start(*arguments, **more).wait()


def rows(text: str):
    return [json.loads(line) for line in text.splitlines()]


def caches(mounted: Path) -> set[str]:
    """The names of all caches."""
    return {str(path.relative_to(mounted)) for path in (mounted / "objects").rglob("*.safetensors")}


def alone(undisturbed: Undisturbed) -> set[str]:
    """What one process makes of the same documents."""
    return {name.removeprefix("kv/") for name in undisturbed.contents if name.startswith("kv/objects/")}


def test_two_machines_at_the_same_time_make_the_corpus_of_one(machine, lots, undisturbed, mounted):
    begun = [machine(f"of {n}").start("precompute", "lots", *SMALL, "--shard", f"{n}/2", "--json") for n in (1, 2)]
    done = [one.wait(300) for one in begun]
    assert [one.code for one in done] == [0, 0], done
    assert any(one.json["finished"] for one in done)
    assert all(one.json["computed"] for one in done)
    assert caches(mounted) == alone(undisturbed)
    again = machine("a third")("precompute", "lots", *SMALL, "--json").json
    assert (again["computed"], again["added"], again["removed"]) == (0, 0, 0)


def test_what_the_tiers_hold(machine, documents, tmp_path):
    one = machine("one")
    assert one("precompute", documents, *CHUNKS).code == 0
    assert one("answer", "How many gates?", "--max-new-tokens", "1").code == 0
    tiers = {row["tier"]: row for row in one("store", "stats", "--json").json["tiers"]}
    assert set(tiers) == {"far", "local"}
    assert tiers["far"]["entries"] >= tiers["local"]["entries"]
    listed = rows(one("store", "ls", "--json").out)
    assert len(listed) == tiers["far"]["entries"]
    assert sum(row["nbytes"] for row in listed) == tiers["far"]["bytes"]
    assert {Path(row["document"]).name for row in listed} == {path.name for path in documents.iterdir()}


def test_verify_finds_damage_in_any_tier(machine, documents, mounted):
    one = machine("one")
    assert one("precompute", documents, *CHUNKS).code == 0
    assert one("store", "verify").code == 0
    file = next((mounted / "objects").rglob("*.safetensors"))
    flip(file, -1)
    found = one("store", "verify")
    assert found.code == 7
    assert found.out.startswith("far: store entry")
    assert "1 of " in one_line(found.err)
    assert "1 damaged and removed" in one("store", "verify", "--delete").out
    assert not file.exists()
    assert one("store", "verify").code == 0


def test_what_a_tier_that_is_down_still_has_is_said(machine, documents, tmp_path):
    one, two = machine("one"), machine("two")
    assert one("precompute", documents, *CHUNKS).code == 0
    before = one("store", "stats", "--json").json["tiers"][1]["entries"]
    assert before > 0
    removed = two("store", "prune", "--older-than", "0", "--store-hot", "redis://127.0.0.1:1/0")
    assert removed.code == 7
    assert "caches removed" in removed.out
    line = removed.err.strip().splitlines()[-1]
    assert "may still be in redis://127.0.0.1:1/0" in line
    assert "run the same command again" in line
    assert two("store", "stats", "--json").code == 0
    looked = one("store", "prune", "--older-than", "0", "--dry-run")
    assert f"{before:,} copies in nearer tiers of caches that were gone would go" in looked.out
    assert (
        f"{before:,} copies in nearer tiers of caches that were gone removed" in one("store", "prune", "--unused").out
    )
    assert one("store", "stats", "--json").json["tiers"][1]["entries"] == 0


def test_a_server_that_is_not_there_is_one_line(blend, tmp_path):
    result = blend("store", "stats", "--store", "redis://127.0.0.1:1/0", "--store-cache", tmp_path / "near")
    assert result.code == 0
    assert "see that it is up" in result.out
    result = blend("answer", "x", "--store", "redis://127.0.0.1:1/0", "--store-cache", tmp_path / "near")
    assert "see that it is up" in result.refused(7)

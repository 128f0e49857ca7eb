"""`--store` with an address, and what `blend store` shows and does over every tier."""

from __future__ import annotations

from pathlib import Path

import pytest
from blend_process import Blend

CHUNKS = ("--chunk-tokens", "64")


@pytest.fixture
def machine(blend: Blend, tmp_path: Path):
    """Calls of `blend` on a machine of that name, over one store that all of them mount."""

    def of(name: str) -> Blend:
        blend.store = None
        env = {"KVBLEND_STORE": f"file://{tmp_path / 'mounted'}", "KVBLEND_STORE_CACHE": str(tmp_path / name)}
        return lambda *arguments: blend(*arguments, env=env)  # type: ignore[return-value]

    return of


def test_a_machine_that_has_nothing_but_the_address_answers(machine, documents) -> None:
    done = machine("one")("precompute", documents, *CHUNKS, "--json")
    assert done.code == 0, done.err
    assert done.json["store"]["entries"] == done.json["computed"] > 0
    question = ("answer", "How many gates?", "--json", "--max-new-tokens", "4")
    answers = [machine(name)(*question) for name in ("one", "two")]
    assert [one.code for one in answers] == [0, 0], answers
    first, second = (one.json for one in answers)
    assert first["answer"] == second["answer"]
    assert all(chunk["hit"] for chunk in second["chunks"])
    again = machine("three")("precompute", documents, *CHUNKS, "--json").json
    assert (again["computed"], again["added"]) == (0, 0)
    assert machine("two")("store", "--json").json["entries"] == done.json["computed"]

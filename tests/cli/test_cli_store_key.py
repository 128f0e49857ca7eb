"""A store that others can write to: only what was sealed with the key is used."""

from blend_process import ANSWER
from made_stores import SECRET, key_file


def test_entries_of_whoever_lacks_the_key_are_told_and_computed_again(filled, documents, tmp_path):
    """The store was filled without a key, as by somebody who can write to it and puts KV of their own there."""
    key = key_file(tmp_path)
    hurt = filled.answer("--store-key", key).json
    assert not any(chunk["hit"] for chunk in hurt["chunks"])
    assert any("was not written with this store key" in problem for problem in hurt["problems"])
    assert filled.precompute(documents, "--store-key", key).json["computed"] > 0
    mended = filled.answer(env={"KVBLEND_STORE_KEY": str(key)}).json
    assert all(chunk["hit"] for chunk in mended["chunks"])
    assert mended["problems"] == []


def test_who_forgets_the_key_changes_nothing(blend, documents, tmp_path):
    """Without it all that is sealed seems damaged, and would be removed, or computed again for nobody else to use."""
    key = key_file(tmp_path)
    blend.precompute(documents, "--store-key", key)
    before = contents(blend.store)
    other = key_file(tmp_path, b"another secret that nobody knows")
    for command in (ANSWER, ("store", "prune", "--unused"), ("store", "verify", "--delete"), ("precompute", documents)):
        for options, words in (((), "give --store-key"), (("--store-key", other), "another store key")):
            assert words in blend(*command, *options).refused(7)
    assert contents(blend.store) == before
    assert "0 damaged" in blend("store", "verify", "--store-key", key).out
    assert not any(SECRET in path.read_bytes() for path in blend.store.rglob("*") if path.is_file())


def contents(store):
    return {path: path.read_bytes() for path in (store / "kv" / "objects").rglob("*.safetensors")}


def test_a_key_that_everyone_can_read_is_told(filled, tmp_path):
    told = filled.here("store", "--store-key", key_file(tmp_path, mode=0o644))
    assert told.code == 0
    assert "everyone on this machine can read the store key" in told.err
    assert "Warning" not in told.err
    short = key_file(tmp_path, b"short")
    assert "16 are the least" in filled.here("store", "--store-key", short).refused(2)

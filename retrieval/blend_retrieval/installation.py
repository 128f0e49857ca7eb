"""The command that installs an extra of kvblend, for messages: it fits how this kvblend was installed."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

_NAME = "kvblend"


def install_command(extra: str) -> str:
    """What a user types to add an extra, such as `pip install 'kvblend[serve]'`.

    A checkout in editable mode, or one that is run without an installation, gives `pip install -e '.[serve]'`, with its path
    where that is not the current folder. A file or an address that pip installed from is named again, because no package
    index may have this version.
    """
    try:
        installed = distribution(_NAME)
    except PackageNotFoundError:
        checkout = Path(__file__).resolve().parents[2]
        return (
            f"pip install {_editable(checkout, extra)}" if (checkout / "pyproject.toml").is_file() else _of_index(extra)
        )
    return f"{_installer(installed)} install {_requirement(installed, extra)}"


def _of_index(extra: str) -> str:
    return f"pip install '{_NAME}[{extra}]'"


def _installer(installed: Distribution) -> str:
    """pip, or `uv pip` in an environment that uv made without pip."""
    made_by_uv = (installed.read_text("INSTALLER") or "").strip() == "uv"
    return "uv pip" if made_by_uv and find_spec("pip") is None else "pip"


def _requirement(installed: Distribution, extra: str) -> str:
    """What to install, quoted for a shell. `direct_url.json` says where it came from, unless an index had it (PEP 610)."""
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    url = origin.get("url", "")
    folder = origin.get("dir_info")
    if folder is not None and folder.get("editable"):
        return _editable(Path(url2pathname(urlsplit(url).path)), extra)
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return shlex.quote(f"{_NAME}[{extra}] @ {url}" if url else f"{_NAME}[{extra}]")


def _editable(checkout: Path, extra: str) -> str:
    is_here = checkout.resolve() == Path.cwd()
    return f"-e {shlex.quote(f'.[{extra}]' if is_here else f'{checkout}[{extra}]')}"

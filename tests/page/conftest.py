"""The page in a real headless Chromium, before a real server with a tiny model and a small corpus."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from places import free_port
from visitor import KEY, Visit, Visitor

from tests.cli.blend_process import Blend, preloaded
from tests.tiny_model import save_tiny_model

TOPICS = ("harbour", "orchard", "glacier", "library")


@pytest.fixture(scope="session")
def chromium() -> str:
    """Where it is. A machine may lack it, but for one that says otherwise."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None and os.environ.get("KVBLEND_TEST_CHROMIUM"):
        pytest.fail("there was a Chromium: apt-get install chromium")
    if found is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    return found


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=60_000)  # a machine with other work beside answers slowly
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any, url: str) -> Iterator[Visit]:
    """Somebody's browser at the page; options are the context's. Nothing may go wrong in it that nobody sees."""
    visitors = []

    def visit(address: str = url, **options: Any) -> Visitor:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(20_000)
        visitors.append(Visitor(context, address))
        return visitors[-1]

    yield visit
    for visitor in visitors:
        visitor.leave()


@pytest.fixture(scope="session")
def commands() -> Iterator[subprocess.Popen[str]]:
    with preloaded() as process:
        yield process


@pytest.fixture(scope="session")
def filled(commands: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Blend:
    """The command line with a tiny model and a store that holds four documents."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "documents").mkdir()
    for topic in TOPICS:
        (folder / "documents" / f"{topic}.md").write_text(_document(topic), encoding="utf-8")
    model = save_tiny_model(folder / "tiny", "\n".join(map(_document, TOPICS)))
    blend = Blend(commands, folder, model, folder / "store")
    result = blend("precompute", folder / "documents", "--chunk-tokens", "64", "--quick")
    assert result.code == 0, result.err
    return blend


def _document(topic: str) -> str:
    lines = (
        f"The {topic} has {part + 2} gates, and keeper {part} counts {13 * part} visitors a day." for part in range(8)
    )
    return f"# The {topic}\n\n" + "\n\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def url(filled: Blend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(filled.at(_copy(filled, tmp_path_factory))) as address:
        yield address


@pytest.fixture(scope="session")
def locked_url(filled: Blend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server that wants `KEY`."""
    with serving(filled.at(_copy(filled, tmp_path_factory)), "--api-key", KEY) as address:
        yield address


def _copy(filled: Blend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert filled.store is not None
    return Path(shutil.copytree(filled.store, tmp_path_factory.mktemp("store") / "store"))


@contextmanager
def serving(blend: Blend, *options: str) -> Iterator[str]:
    """The address of a `blend serve` that is ready."""
    port = free_port()
    address = f"http://127.0.0.1:{port}/"
    running = blend.start("serve", "--port", str(port), "--min-score", "0", *options)
    try:
        running.until(lambda: _ready(f"{address}ready"))
        yield address
    finally:
        running.send(15)  # type: ignore[arg-type]
        running.wait(30)


def _ready(address: str) -> bool:
    time.sleep(0.1)
    try:
        return httpx.get(address, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False

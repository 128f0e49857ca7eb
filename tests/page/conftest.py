"""The page in a real headless Chromium, before a real server with a tiny model and a small corpus."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from visitor import KEY, Visitor

from tests import towns
from tests.cli.blend_process import Blend, preloaded, serving
from tests.tiny_model import save_tiny_model


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A machine may lack it, but for one that says otherwise."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        end = pytest.fail if os.environ.get("KVBLEND_TEST_CHROMIUM") else pytest.skip
        end("there is no Chromium here: apt-get install chromium")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=60_000)  # a machine with other work beside answers slowly
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any, url: str) -> Iterator[Callable[..., Visitor]]:
    """Somebody's browser at the page; options are the context's. Nothing may go wrong in it that nobody sees."""
    visitors = []

    def visit(address: str = url, *, refused: bool = False, **options: Any) -> Visitor:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(20_000)
        visitors.append(Visitor(context, address, refused))
        return visitors[-1]

    yield visit
    for visitor in visitors:
        visitor.leave()


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Blend]:
    """The command line with a tiny model and a store that holds four documents."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "documents").mkdir()
    texts = towns.documents()
    for name in ("harbour.md", "orchard.md", "glacier.md", "library.md"):
        (folder / "documents" / name).write_text(texts[name], encoding="utf-8")
    model = save_tiny_model(folder / "tiny", "\n".join(texts.values()))
    with preloaded() as request:
        blend = Blend(request, folder, model, folder / "store")
        blend.precompute("documents", "--quick")
        yield blend


@pytest.fixture(scope="session")
def url(filled: Blend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from serve(filled, tmp_path_factory.mktemp("open"))


@pytest.fixture(scope="session")
def locked_url(filled: Blend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server that wants `KEY`."""
    yield from serve(filled, tmp_path_factory.mktemp("locked"), "--api-key", KEY)


def serve(filled: Blend, folder: Path, *options: str) -> Iterator[str]:
    """The address of a server over a copy of the store in this folder."""
    blend = filled.at(shutil.copytree(filled.store, folder / "store"))
    with serving(blend, "--min-score", "0", *options) as (running, _):
        yield f"{running.url()}/"

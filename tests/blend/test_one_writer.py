"""KV corrections are measured for minutes and kept in a moment: what was decided anew meanwhile is not undone."""

import pytest
from cases import make_layout
from models import decoder

from blend.chunks import fit
from blend.chunks.surrogate import with_given_surrogate, with_surrogate
from blend.prefill.blender import Blender
from blend.store import open_store

PREFIX = make_layout().prefix
CHUNKS = [tuple((3 + 7 * i + j * 5) % 90 + 3 for j in range(14)) for i in range(40)]


@pytest.fixture
def two(tmp_path):
    """Blenders of two processes, as far as the store knows, over a corpus with both kinds of caches."""
    blenders = [Blender(decoder("llama"), open_store(tmp_path)) for _ in range(2)]
    library = with_surrogate(blenders[0].library(PREFIX), CHUNKS, 28)
    library.compute(library.missing(CHUNKS))
    return blenders


def artifacts(blender):
    return {name: blender.store.read_artifact(name) for name in blender.store.artifacts()}


def meanwhile(monkeypatch, change):
    """Called once, while somebody fits."""
    plain, done = fit.fit_corrections, []

    def slow(*arguments, **options):
        found = plain(*arguments, **options)
        if not done:
            done.append(True)
            change()
        return found

    monkeypatch.setattr(fit, "fit_corrections", slow)


def test_another_surrogate_context(two, monkeypatch):
    here, there = two
    meanwhile(monkeypatch, lambda: with_given_surrogate(there.library(PREFIX), tuple(range(3, 33))))
    here.calibrate(PREFIX, CHUNKS, anew=True)
    assert not any(name.startswith("correction") for name in artifacts(here))


def test_a_change_elsewhere_costs_nothing(two, monkeypatch):
    here, there = two
    meanwhile(monkeypatch, lambda: there.store.write_artifact("of-another-corpus", b"x"))
    assert here.calibrate(PREFIX, CHUNKS, anew=True)
    assert sum(name.startswith("correction-") for name in artifacts(here)) == 2


def test_the_lock_of_writers_is_held(two, monkeypatch, tmp_path):
    from filelock import FileLock, Timeout

    here, _ = two
    write = here.store.write_artifact

    def checked(name, content):
        with pytest.raises(Timeout), FileLock(tmp_path / ".writing", timeout=0):
            pass
        write(name, content)

    monkeypatch.setattr(here.store, "write_artifact", checked)
    assert here.calibrate(PREFIX, CHUNKS, anew=True)

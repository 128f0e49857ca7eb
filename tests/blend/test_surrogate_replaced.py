"""A surrogate context that is replaced leaves nothing behind: neither caches nor what was measured on them, nor words."""

from cases import make_layout
from models import decoder

from blend.chunks.library import ChunkLibrary
from blend.chunks.surrogate import with_given_surrogate, with_surrogate, without_surrogate
from blend.store import open_store
from blend.types import CacheKind

PREFIX = make_layout().prefix
CHUNKS = [tuple((3 + 7 * i + j * 5) % 90 + 3 for j in range(14)) for i in range(24)]
CHANGES = {"given": lambda library: with_given_surrogate(library, (9, 8, 7, 6, 5)), "none": without_surrogate}


def measured(corpus: str = "", store=None) -> ChunkLibrary:
    """With two caches behind the surrogate context, and something under the names of everything that is measured."""
    library = ChunkLibrary(decoder("llama"), store or open_store("memory:"), PREFIX, corpus=corpus)
    library = with_surrogate(library, CHUNKS, 28)
    library.compute([one for one in library.variants(CHUNKS) if one.kind is CacheKind.CONTEXTUAL][:2])
    for encoder in (library.isolated, library.contextual):
        library.store.write_artifact(encoder.identity.correction_name, b"measured")
    library.store.describe(library.contextual.identity.namespace, {"contextual": "surrogate context"})
    library.store.describe(library.isolated.identity.namespace, {"model": "tiny"})
    return library


def test_whoever_replaces_it():
    for change in CHANGES.values():
        library = measured()
        isolated = library.isolated.identity
        now = change(library)
        assert now.surrogate != library.surrogate
        assert set(now.store.artifacts()) == {isolated.surrogate_name, isolated.correction_name}
        assert set(now.store.namespaces()) == {isolated.namespace}
        assert list(now.store.keys()) == []


def test_what_another_corpus_uses_stays():
    library = measured()
    other = measured("legal", library.store)
    assert other.contextual.identity.namespace == library.contextual.identity.namespace
    used = set(library.store.keys())
    without_surrogate(library, lambda: used)
    assert set(library.store.keys()) == used
    assert other.contextual.identity.namespace in library.store.namespaces()
    left = {name for name in library.store.artifacts() if name.endswith("-legal")}
    assert len(left) == 3

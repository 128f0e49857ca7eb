"""What is heavy is loaded once, however many threads ask for it first; and not one library more than is in use is kept."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from threading import RLock

import pytest
from blends import empty_blender
from cases import make_layout

from blend.layout import PromptLayout
from blend.prefill.resources import MOST_PREFIXES
from blend.rag import loaded_once
from tests.store.reading import in_threads


class _Slow:
    """Two properties, one of which needs the other."""

    def __init__(self) -> None:
        self.loading = RLock()
        self.loads: list[str] = []

    @loaded_once
    def model(self) -> object:
        self.loads.append("model")
        return object()

    @loaded_once
    def blender(self) -> tuple[object]:
        self.loads.append("blender")
        return (self.model,)


@pytest.mark.parametrize("attempt", range(20))
def test_threads_that_ask_at_once_get_the_same(attempt):
    slow, found = _Slow(), set[int]()
    in_threads(8, lambda number: found.add(id(slow.blender[0] if number % 2 else slow.model)))
    assert len(found) == 1
    assert sorted(slow.loads) == ["blender", "model"]


def test_what_fails_is_tried_again():
    class Failing(_Slow):
        @loaded_once
        def weights(self) -> int:
            self.loads.append("weights")
            return 1 // (len(self.loads) - 1)

    one = Failing()
    for expected in (["weights"], ["weights", "weights"]):
        with suppress(ZeroDivisionError):
            assert one.weights == 1
        assert one.loads == expected


@pytest.fixture
def others_frozen() -> Iterator[None]:
    """What other tests hold is left out of collections, each of which would take half a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_the_kv_of_prefixes_that_nobody_uses_is_let_go(others_frozen):
    layout, blender = make_layout(), empty_blender()
    first = blender.prefill(layout)
    encoders = []
    for number in range(2 * MOST_PREFIXES):
        prefix = (*layout.prefix, number)
        encoders.append(weakref.ref(blender.encoder(prefix)))
        blender.prefill(PromptLayout.of_chunks(prefix, layout.chunks[:1], layout.suffix))
        blender.prefill(PromptLayout.of_chunks(prefix, (), layout.suffix))
        gc.collect()
        assert sum(encoder() is not None for encoder in encoders) <= MOST_PREFIXES
    assert blender.prefill(layout).logits.equal(first.logits)

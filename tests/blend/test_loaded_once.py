"""What is heavy is loaded once, however many threads ask for it first; and not one library more than is in use is kept."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, RLock

from cases import make_layout
from models import decoder

from blend.prefill.blender import Blender
from blend.prefill.inputs import MOST_PREFIXES
from blend.rag import loaded_once
from blend.store import open_store
from blend.types import PromptLayout

THREADS = 8


class _Slow:
    """Two properties, one of which needs the other."""

    def __init__(self) -> None:
        self.loading = RLock()
        self.loads: list[str] = []
        self.met = Barrier(THREADS)

    @loaded_once
    def model(self) -> object:
        self.loads.append("model")
        return object()

    @loaded_once
    def blender(self) -> tuple[object]:
        self.loads.append("blender")
        return (self.model,)


def test_threads_that_ask_at_once_get_the_same():
    for _ in range(20):
        slow = _Slow()

        def ask(number: int, slow: _Slow = slow) -> object:
            slow.met.wait()
            return slow.blender[0] if number % 2 else slow.model

        with ThreadPoolExecutor(THREADS) as threads:
            found = set(map(id, threads.map(ask, range(THREADS))))
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


def test_the_kv_of_prefixes_that_nobody_uses_is_let_go():
    layout, blender = make_layout(), Blender(decoder("llama"), open_store("memory:"))
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

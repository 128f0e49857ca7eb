"""The order in which entries leave memory is that of the paper."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blend.store.gdsf import EXCHANGE_BYTES, Gdsf

MB = 1 << 20


class Naive:
    """Greedy-Dual-Size-Frequency as the paper has it: everything looked at every time."""

    def __init__(self, budget):
        self.budget, self.clock, self.turn = budget, 0.0, 0
        self.files = {}  # name -> [priority, turn, size, frequency]

    def priority(self, size, frequency):
        return self.clock + frequency * ((EXCHANGE_BYTES + size) / size)

    def rank(self, name, size, frequency):
        self.turn += 1
        self.files[name] = [self.priority(size, frequency), self.turn, size, frequency]

    def ask(self, name, size, busy):
        """Whether it was a hit; and who went."""
        if name in self.files:
            _, _, size, frequency = self.files[name]
            self.rank(name, size, frequency + 1)
            return True, set()
        excess = sum(one[2] for one in self.files.values()) + size - self.budget
        newcomer, going = self.priority(size, 1), []
        for other in sorted(set(self.files) - busy, key=lambda one: self.files[one][:2]):
            if excess <= 0 or self.files[other][0] > newcomer:
                break
            going.append(other)
            excess -= self.files[other][2]
        if excess > 0:
            return False, set()
        for other in going:
            self.clock = max(self.clock, self.files.pop(other)[0])
        self.rank(name, size, 1)
        return False, set(going)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["use", "use", "use", "remove"]),
            st.integers(0, 11),
            st.sets(st.integers(0, 11), max_size=4),
        ),
        max_size=150,
    ),
    st.integers(1, 12),
)
def test_the_same_go_as_by_the_paper(steps, budget_mb):
    budget = budget_mb * MB
    order, naive, nbytes = Gdsf(), Naive(budget), {}
    for what, name, busy in steps:
        size = (1 + name % 4) * MB // 2
        if what == "remove":
            if name in nbytes:
                order.remove(name)
                del nbytes[name], naive.files[name]
            continue
        hit, gone = naive.ask(name, size, busy)
        assert hit == (name in nbytes)
        if hit:
            order.use(name)
            continue
        excess = sum(nbytes.values()) + size - budget
        found = order.evict(size, excess, busy.__contains__)
        assert (found is None) == (name not in naive.files)
        assert set(found or ()) == gone
        for other in found or ():
            del nbytes[other]
        if found is not None:
            order.add(name, size)
            nbytes[name] = size
        assert nbytes.keys() == naive.files.keys()
        assert order.clock == naive.clock
    assert sum(nbytes.values()) <= budget


def nobody(_name):
    return False


def test_what_is_used_often_outlasts_a_scan():
    order = Gdsf()
    for name in ("often", "once"):
        order.add(name, MB)
    for _ in range(5):
        order.use("often")
    assert order.evict(MB, MB, nobody) == ["once"]
    order.add("scan 0", MB)
    for number in range(1, 4):
        assert order.evict(MB, MB, nobody) == [f"scan {number - 1}"]
        order.add(f"scan {number}", MB)


def test_what_was_used_often_goes_in_the_end():
    order, scan = Gdsf(), 0
    order.add("once upon a time", MB)
    for _ in range(4):
        order.use("once upon a time")
    order.add(scan, MB)
    while (gone := order.evict(MB, MB, nobody)) != ["once upon a time"]:
        assert gone == [scan]
        scan += 1
        assert scan < 10
        order.add(scan, MB)


def test_a_large_newcomer_does_not_push_out_small_ones():
    order = Gdsf()
    for number in range(4):
        order.add(number, MB)
    assert order.evict(4 * MB, 4 * MB, nobody) is None
    assert order.evict(MB, MB, nobody) == [0]


def test_many_uses_do_not_fill_the_memory():
    order = Gdsf()
    order.add("one", MB)
    for _ in range(10_000):
        order.use("one")
    assert len(order._heap) < 200


@pytest.mark.parametrize("excess", [-5, 0])
def test_where_there_is_room_nothing_goes(excess):
    order = Gdsf()
    order.add("one", MB)
    assert order.evict(MB, excess, nobody) == []
    assert order.clock == 0

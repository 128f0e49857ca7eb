"""Who has more than a fair share of a cache."""

import pytest

from blend.serve.engine.edits import Spelling
from blend.serve.engine.histories import Histories
from blend.serve.engine.prefixes import Conversation
from blend.serve.request import RequestOrigin
from blend.serve.shares import Holder, Shares

ANN, ZOE, EVE, BOB = Holder("a", "ann"), Holder("a", "zoe"), Holder("b", "eve"), Holder("b", "bob")


@pytest.mark.parametrize(
    ("sizes", "exceeding"),
    [
        ({ANN: 5}, set()),
        ({ANN: 5, EVE: 5}, set()),
        ({ANN: 4, EVE: 6}, {EVE}),
        (
            {ANN: 4, ZOE: 1, EVE: 5},
            set(),
        ),  # more than half of the client's share, and the client has no more than its own
        ({ANN: 4, ZOE: 3, EVE: 3}, {ANN, ZOE}),
        ({ANN: 6, ZOE: 1, EVE: 2, BOB: 1}, {ANN}),
        (
            {ANN: 3, **{Holder("b", str(number)): 1 for number in range(7)}},
            {Holder("b", str(number)) for number in range(7)},
        ),
    ],
)
def test_a_client_and_its_user_must_both_have_more_than_their_shares(
    sizes: dict[Holder, int], exceeding: set[Holder]
) -> None:
    shares = Shares(10, sizes, sizes)
    assert {holder for holder in sizes if shares.exceeded_by(holder)} == exceeding


def test_what_makes_room_counts_no_longer() -> None:
    shares = Shares(10, {ANN: 4, EVE: 7}, {ANN, EVE})
    shares.remove(EVE, 1)
    assert shares.exceeded_by(EVE)
    shares.remove(EVE, 1)
    assert not shares.exceeded_by(EVE)


def test_whoever_is_away_has_no_share() -> None:
    shares = Shares(10, {ANN: 1, EVE: 9}, {EVE})
    assert (shares.exceeded_by(ANN), shares.exceeded_by(EVE)) == (True, False)


def conversation(number: int) -> Conversation:
    return Conversation("", tuple(range(100 * number, 100 * number + 9)), (1,))


def test_a_flood_of_sessions_takes_no_history_of_anothers_share() -> None:
    histories = Histories(Spelling(None), most_tokens=100)
    for number in range(4):
        histories.note("ann", conversation(number), None, exact=True, origin=RequestOrigin("ann"))
    for number in range(10, 60):
        eve = RequestOrigin("eve", f"s{number}")
        histories.note(eve.users_session, conversation(number), None, exact=True, origin=eve)
    assert [len(histories.of("", author)) for author in ("ann", "eve/s10", "eve/s59")] == [4, 0, 1]
    ended = RequestOrigin("ann", "mill", ended=lambda: True)
    histories.note(ended.users_session, conversation(7), None, exact=True, origin=ended)
    assert histories.of("", ended.users_session) == ()

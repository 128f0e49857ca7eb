"""Who has more than a fair share of a cache."""

import pytest

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

"""When reading ahead of the routers is worth it."""

from __future__ import annotations

from shadowlane.planner.look_ahead import LookAhead, LookAheadSettings

SETTINGS = LookAheadSettings(window=64, least_use=0.5, min_reads=16, rest_routes=10, most_rest=30)


def guess(look: LookAhead, right: int, wrong: int) -> None:
    look.note(right=right, wrong=wrong, named=right, chosen=4, withdrawn=0)


def rests_for(look: LookAhead) -> int:
    count = 0
    while not look.is_on:
        look.pass_route()
        count += 1
    return count


def test_it_goes_on_while_enough_is_used() -> None:
    look = LookAhead(SETTINGS)
    for _ in range(100):
        guess(look, right=3, wrong=1)
    assert look.is_on
    assert (look.early_reads, look.used_reads) == (400, 300)
    assert look.recall == 0.75


def test_it_rests_when_too_little_is_used_and_longer_each_time() -> None:
    look = LookAhead(SETTINGS)
    rests = []
    for _ in range(4):
        while look.is_on:
            guess(look, right=1, wrong=3)
        rests.append(rests_for(look))
    assert rests == [10, 20, 30, 30]


def test_a_few_bad_guesses_are_no_verdict() -> None:
    look = LookAhead(SETTINGS)
    guess(look, right=0, wrong=15)
    assert look.is_on
    guess(look, right=0, wrong=2)
    assert not look.is_on


def test_what_was_withdrawn_in_time_costs_nothing() -> None:
    look = LookAhead(SETTINGS)
    for _ in range(100):
        look.note(right=0, wrong=0, named=0, chosen=4, withdrawn=4)
    assert look.is_on
    assert look.withdrawn == 400
    assert LookAhead(SETTINGS).recall is None

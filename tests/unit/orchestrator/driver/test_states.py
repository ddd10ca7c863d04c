"""The states of the driver, and what may not follow what."""

import itertools

import pytest

from orchestrator.driver.states import (
    FOLLOWERS,
    BackingOff,
    Beginning,
    Ended,
    Halting,
    IllegalTransition,
    Importing,
    Recovering,
    Reserving,
    Saving,
    Training,
    follow,
    saving,
)

STATES = [Beginning(), Reserving(), Importing(), Training(), Saving(0), Halting(), Recovering(), BackingOff(), Ended()]
NEVER = {
    (Beginning, Saving): "no gang could save",
    (Reserving, Training): "machines that were just reserved train nothing",
    (Saving, Training): "a gang that was asked to stop does not train on",
    (Halting, Training): "killed processes",
    (BackingOff, Training): "the back-off ends with a recovery",
}


def test_every_state_is_among_them():
    assert {type(state) for state in STATES} == {*FOLLOWERS}


def test_what_must_not_follow_raises_pair_by_pair():
    tried = 0
    for before, after in itertools.product(STATES, STATES):
        if type(after) in FOLLOWERS[type(before)]:
            assert follow([before], after) is after
        else:
            with pytest.raises(IllegalTransition, match=f"{type(before).__name__}: {type(after).__name__} cannot follow"):
                follow([before], after)
            tried += 1
    assert tried == 81 - sum(map(len, FOLLOWERS.values()))


@pytest.mark.parametrize(("pair", "why"), NEVER.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_makes_no_sense_is_not_allowed(pair, why):
    before, after = pair
    assert after not in FOLLOWERS[before], why


def test_nothing_follows_the_end_and_everything_can_end():
    assert FOLLOWERS[Ended] == ()
    assert all(Ended in followers for state, followers in FOLLOWERS.items() if state is not Ended)


def test_an_error_has_the_story():
    story = [Beginning(), Reserving(), Importing()]
    with pytest.raises(
        IllegalTransition, match=r"Beginning -> Reserving -> Importing: BackingOff cannot follow; expected Training"
    ):
        follow(story, BackingOff())


def test_what_is_known_of_a_save_is_kept_until_the_next_generation():
    paused = saving(Training(), 3, pauses=True)
    asked = saving(paused, 3, stop_ordered_at_s=5.0)
    assert asked == Saving(3, stop_ordered_at_s=5.0, pauses=True)
    assert saving(asked, 4, pauses=True) == Saving(4, pauses=True)

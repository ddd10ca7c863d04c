"""The time that a run has used of its limit, by a clock that is a number."""

from __future__ import annotations

from orchestrator.run_state.progress import TimeUsed


def test_it_counts_from_the_first_gang_of_a_launch():
    used = TimeUsed()
    assert used.seconds(100.0) == 0.0
    used.begin(100.0)
    used.begin(150.0)
    assert used.seconds(160.0) == 60.0


def test_the_time_without_a_driver_counts_and_that_between_launches_does_not():
    used = TimeUsed()
    used.begin(100.0)
    stored = used.to_dict(130.0)
    assert TimeUsed.resume(stored, same_launch=True).seconds(150.0) == 50.0
    later = TimeUsed.resume(stored, same_launch=False)
    assert later.seconds(1000.0) == 30.0
    later.begin(1000.0)
    assert later.seconds(1005.0) == 35.0


def test_a_clock_that_is_set_back_takes_nothing_away():
    used = TimeUsed()
    used.begin(100.0)
    following = TimeUsed.resume(used.to_dict(130.0), same_launch=True)
    assert following.seconds(90.0) == 30.0
    assert following.to_dict(90.0)["seconds"] == 30.0


def test_a_launch_that_never_trained_has_used_nothing():
    assert TimeUsed.resume(TimeUsed().to_dict(50.0), same_launch=True).seconds(500.0) == 0.0

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.policies.elasticity import (
    ElasticityPolicy,
    Grow,
    Members,
    Stay,
    allowed_counts,
    choose_members,
    next_precompilation,
    should_grow,
)

ANY = range(1, 9)


def test_allowed_counts_are_those_that_fit():
    assert allowed_counts(2, 8, lambda hosts: 8 % hosts == 0) == [2, 4, 8]
    assert allowed_counts(3, 3, lambda hosts: False) == []


CHOICES = {
    "nobody is lost: the same gang": ([0, 1, 2], [0, 1, 2], ANY, [], [0, 1, 2], []),
    "ranks stay as they were, whatever the slots' numbers": ([2, 0, 1], [0, 1, 2], ANY, [], [2, 0, 1], []),
    "a spare takes the lost one's rank": ([0, 1, 2], [0, 2, 5], ANY, [], [0, 5, 2], []),
    "the lost coordinator's rank too": ([0, 1, 2], [1, 2, 5], ANY, [], [5, 1, 2], []),
    "two lost, one spare: the first gap is filled, the ranks close up": ([0, 1, 2, 3], [0, 3, 9], ANY, [], [0, 9, 3], []),
    "no spare: the ranks close up": ([0, 1, 2], [0, 2], ANY, [], [0, 2], []),
    "shrinks to the largest count that is allowed": ([0, 1, 2, 3], [0, 2, 3], [2, 4], [], [0, 2], []),
    "a spare is not taken where the count does not allow it": ([0, 1, 2], [0, 2, 5], [2], [], [0, 2], []),
    "more hosts than before, at the end": ([0, 1], [0, 1, 4, 3], ANY, [], [0, 1, 3, 4], []),
    "more hosts and one lost: the gap first": ([0, 1], [1, 3, 4], ANY, [], [3, 1, 4], []),
    "the first gang of all": ([], [2, 0, 1], [1, 2], [], [0, 1], []),
    "one to avoid gives way to a spare": ([0, 1, 2], [0, 1, 2, 5], [3], [1], [0, 5, 2], []),
    "one to avoid is left out, if there may be fewer": ([0, 1, 2], [0, 1, 2], [2, 3], [1], [0, 2], []),
    "one to avoid is kept, if there would be too few": ([0, 1, 2], [0, 1, 2], [3], [1], [0, 1, 2], [1]),
    "no more to avoid are kept than needed": ([0, 1, 2], [0, 1, 2], [2, 3], [1, 2], [0, 1], [1]),
    "a spare to avoid is no better than none": ([0, 1, 2], [0, 2, 5], [2, 3], [5], [0, 2], []),
    "all to avoid": ([0, 1], [0, 1], [2], [0, 1], [0, 1], [0, 1]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choose_members(name):
    present, available, allowed, avoid, slots, flagged = CHOICES[name]
    assert choose_members(present, available, allowed=allowed, avoid=avoid) == Members(tuple(slots), tuple(flagged))


@pytest.mark.parametrize(
    ("available", "allowed"),
    [([0], [2, 3]), ([], [1]), ([0, 1], [])],
    ids=["too few are left", "nobody is left", "no count is allowed"],
)
def test_no_members(available, allowed):
    assert choose_members([0, 1, 2], available, allowed=allowed) is None


slots = st.lists(st.integers(0, 7), unique=True)


@given(slots, slots, st.lists(st.integers(1, 8), unique=True), st.sets(st.integers(0, 7)))
def test_members_are_available_each_once_as_many_as_allowed_and_survivors_keep_their_order(present, available, allowed, avoid):
    chosen = choose_members(present, available, allowed=sorted(allowed), avoid=avoid)
    if chosen is None:
        assert not allowed or len(available) < min(allowed)
        return
    assert set(chosen.slots) <= set(available)
    assert len(set(chosen.slots)) == len(chosen.slots)
    assert len(chosen.slots) in allowed
    assert [s for s in chosen.slots if s in present] == [s for s in present if s in chosen.slots]
    assert set(chosen.flagged) == set(chosen.slots) & avoid
    if chosen.flagged:
        assert len(chosen.slots) == min(allowed)


POLICY = ElasticityPolicy(restart_cost_s=6.0, horizon_s=100.0)


def grow(current=2, possible=4, *, remaining_steps=1000, step_s=None, cost_s=None, policy=POLICY):
    step_s = {2: 0.1} if step_s is None else step_s
    return should_grow(current, possible, remaining_steps=remaining_steps, step_s=step_s, cost_s=cost_s, policy=policy)


GROWTH = {
    "half the time for a thousand steps repays six seconds": ({}, Grow),
    "a hundred steps do not repay it": ({"remaining_steps": 100}, Stay),
    "a run without an end counts to the horizon": ({"remaining_steps": None}, Grow),
    "beyond the horizon nothing counts": ({"remaining_steps": None, "cost_s": 51.0}, Stay),
    "a restart that was measured to be cheaper": ({"remaining_steps": 100, "cost_s": 4.0}, Grow),
    "four hosts were measured to be no faster": ({"step_s": {2: 0.1, 4: 0.1}}, Stay),
    "four hosts were measured to be slower": ({"step_s": {2: 0.1, 4: 0.2}}, Stay),
    "no step was measured": ({"step_s": {}}, Stay),
    "nobody has come": ({"possible": 2}, Stay),
    "never": ({"policy": ElasticityPolicy(grow="never")}, Stay),
    "at once": ({"policy": ElasticityPolicy(grow="at_once"), "remaining_steps": 1}, Grow),
    "at once, but nobody has come": ({"policy": ElasticityPolicy(grow="at_once"), "possible": 1}, Stay),
}


@pytest.mark.parametrize("name", GROWTH)
def test_should_grow(name):
    values, expected = GROWTH[name]
    assert isinstance(grow(**values), expected)


def test_growing_says_what_it_saves_and_costs():
    assert grow() == Grow("4 hosts instead of 2 save 50.0 s over 1000 steps, a restart costs 6.0 s")


@pytest.mark.parametrize("name", ["restart_cost_s", "horizon_s"])
def test_policy_rejects_negative_seconds(name):
    with pytest.raises(ValueError, match=rf"{name} = -1: expected 0 or more"):
        ElasticityPolicy(**{name: -1})


PRECOMPILATIONS = {
    "one host less": ([0, 1, 2], [], [2, 3], {3: [0, 1, 2]}, (0, 1)),
    "whoever is left, also if it is the last": ([0, 1, 2], [], [2, 3], {3: [0, 1, 2], 2: [0, 1]}, (2, 0)),
    "all is compiled": ([0, 1, 2], [], [2, 3], {3: [0, 1, 2], 2: [0, 1, 2]}, None),
    "no smaller gang is allowed": ([0, 1, 2], [], [3], {3: [0, 1, 2]}, None),
    "the next smaller gang that is allowed": ([0, 1, 2, 3], [], [2, 4], {4: [0, 1, 2, 3]}, (0, 1)),
    "a spare, with those whom it would join": ([0, 1], [5], [2], {2: [0, 1]}, (5, 0)),
    "a spare before a smaller gang": ([0, 1], [5], [1, 2], {2: [0, 1]}, (5, 0)),
    "a spare of one host": ([0], [5], [1], {1: [0]}, (5,)),
    "a larger gang before all": ([0, 1], [5, 7], [1, 2, 3, 4], {2: [0, 1]}, (0, 1, 5, 7)),
    "and then what there is for its smaller ones": ([0, 1], [5], [1, 2, 3], {3: [0, 1, 5], 2: [0, 1, 5]}, (0,)),
    "one that could not be precompiled is left out": ([0, 1, 2], [3], [2], {}, (0, 1)),
}


@pytest.mark.parametrize("name", PRECOMPILATIONS)
def test_next_precompilation(name):
    present, others, allowed, ready, expected = PRECOMPILATIONS[name]
    found = next_precompilation(present, others, allowed=allowed, is_ready=lambda count, slot: slot in ready.get(count, ()))
    assert found == expected


@given(slots.filter(bool), slots, st.lists(st.integers(1, 8), unique=True))
def test_precompilations_come_to_an_end_and_then_any_loss_is_prepared_for(present, others, allowed):
    others, ready = [slot for slot in others if slot not in present], {(len(present), slot) for slot in present}
    about = {"allowed": sorted(allowed), "is_ready": lambda count, slot: (count, slot) in ready}
    while (cast := next_precompilation(present, others, **about)) is not None:
        assert not {(len(cast), slot) for slot in cast} <= ready
        ready |= {(len(cast), slot) for slot in cast}
    for lost in present:
        left = [slot for slot in [*present, *others] if slot != lost]
        after = choose_members(present, left, allowed=[n for n in sorted(allowed) if n <= len(present)])
        if after is not None and len(present) in allowed:
            assert {(len(after.slots), slot) for slot in after.slots} <= ready

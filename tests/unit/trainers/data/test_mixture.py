"""Mixtures: exact proportions wherever one looks, schedules, sources that leave."""

from __future__ import annotations

import collections
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gangway.errors import UsageError
from trainers.data.mixture import Mixture, Share

WEIGHTS = st.lists(st.sampled_from([0.05, 0.1, 0.333, 0.5, 1.0, 2.999, 7.0]), min_size=1, max_size=6)


def constant(*weights, max_rows=None):
    limits = max_rows or (None,) * len(weights)
    shares = (
        Share(f"s{number}", ((0, weight),), limit) for number, (weight, limit) in enumerate(zip(weights, limits, strict=True))
    )
    return Mixture([*shares])


@settings(max_examples=80)
@given(WEIGHTS, st.integers(0, 10**9), st.integers(1, 300))
def test_the_rows_of_any_window_are_in_the_proportions_of_the_weights(weights, first, num_rows):
    made = constant(*weights)
    found = collections.Counter(made.at(index).source for index in range(first, first + num_rows))
    for number, weight in enumerate(weights):
        share = num_rows * weight / sum(weights)
        assert abs(found[number] - share) <= math.log2(len(weights)) + 1 + 1e-9


@settings(max_examples=60)
@given(WEIGHTS, st.lists(st.one_of(st.none(), st.integers(1, 60)), min_size=6, max_size=6), st.integers(0, 200))
def test_each_source_gives_its_rows_one_after_the_other_and_no_more_than_it_may(weights, limits, num_rows):
    made = constant(*weights, max_rows=limits[: len(weights)])
    of_source = [0] * len(weights)
    for index in range(num_rows):
        source, row = made.at(index)
        assert row == of_source[source]
        of_source[source] += 1
        assert made.counts(index + 1) == tuple(of_source)
        if made.num_rows is None and limits[source] is not None:
            assert row < limits[source]


def test_the_proportions_hold_at_once():
    assert [place.source for place in map(constant(2, 1, 1).at, range(8))] == [0, 1, 0, 2, 0, 1, 0, 2]
    assert constant(1, 2.999).counts(3999) == (1000, 2999)
    assert constant(0.1, 0.2, 0.7).counts(10) == (1, 2, 7)


def test_weights_change_at_the_rows_that_the_schedule_says():
    made = Mixture([Share("a", ((0, 1.0), (100, 0.25))), Share("b", ((0, 0.0), (100, 0.75), (200, 0.0)))])
    assert made.counts(100) == (100, 0)
    assert made.counts(200) == (125, 75)
    assert made.counts(1000) == (925, 75)
    assert made.at(99) == (0, 99)
    assert made.at(10**12).source == 0


def test_a_source_leaves_after_its_rows_and_the_others_share_what_it_had():
    made = constant(2, 1, 1, max_rows=(20, None, None))
    assert made.num_rows is None
    assert made.counts(40)[0] == 20
    assert made.counts(140) == pytest.approx((20, 60, 60), abs=1)
    assert {made.at(index).source for index in range(40, 140)} == {1, 2}


def test_when_all_have_left_all_begin_anew():
    made = constant(1, 3, max_rows=(10, 6))
    assert made.num_rows == 16
    assert made.counts(16) == (10, 6)
    assert made.counts(36) == tuple(2 * whole + part for whole, part in zip((10, 6), made.counts(4), strict=True))
    assert [made.at(index).source for index in range(16)] == [made.at(index).source for index in range(16, 32)]
    assert made.at(16).row == made.counts(16)[made.at(16).source]


def test_sources_without_a_weight_that_are_left_alone_are_an_error():
    with pytest.raises(UsageError, match="from row 10 on only s1 are left, with weight 0"):
        constant(1, 0, max_rows=(10, None))

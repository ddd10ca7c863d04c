"""Packing: every token once an epoch, full rows, anew each epoch, the same on any machine."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.data.epoch_order import digests, order, shuffled
from trainers.data.packing import Concat, plan

LENGTH = 16
LENGTHS = st.lists(st.integers(0, 3 * LENGTH), min_size=1, max_size=40).map(np.array)


def rows(made, epoch=0):
    return [made.pieces(epoch, row) for row in range(len(made))]


def places(made, epoch=0):
    """By (document, token): how often it is in a row."""
    return collections.Counter(
        (piece.document, token) for row in rows(made, epoch) for piece in row for token in range(piece.start, piece.stop)
    )


def targets(made, epoch=0):
    """By (document, token): how often it is predicted from its predecessor."""
    return collections.Counter(
        (piece.document, token) for row in rows(made, epoch) for piece in row for token in range(piece.start + 1, piece.stop)
    )


def each_target_once(lengths):
    return {(document, token): 1 for document, length in enumerate(lengths) for token in range(1, length)}


@settings(max_examples=60)
@given(LENGTHS, st.integers(0, 3), st.integers(0, 2))
def test_every_token_with_a_predecessor_in_its_document_is_a_target_once_an_epoch(lengths, seed, epoch):
    for packing in ("concat", "fit", None):
        made = plan(lengths, packing, LENGTH, (seed,), overlong="split")
        assert targets(made, epoch) == each_target_once(lengths)
        assert all(sum(piece.stop - piece.start for piece in row) <= LENGTH + 1 for row in rows(made, epoch))
        counts = made.counts
        assert counts.filled_places == sum(places(made, epoch).values())
        assert (counts.num_documents, counts.num_rows) == (len(lengths), len(made))
        assert counts.num_short == sum(lengths < 2)
        assert counts.num_overlong == sum(lengths > LENGTH + 1)


def test_windows_of_a_stream_overlap_by_one_token_and_a_cut_document_goes_on_in_the_next():
    made = plan(np.array([10, 30]), "concat", LENGTH, (0,), shuffle=False)
    assert rows(made) == [[(0, 0, 10), (1, 0, 7)], [(1, 6, 23)], [(1, 22, 30)]]
    assert made.counts.efficiency == pytest.approx((17 + 17 + 8) / 51)


def test_the_stream_of_each_epoch_is_in_another_order():
    made = plan(np.full(50, 8), "concat", LENGTH, (0,))
    orders = [[*dict.fromkeys(piece.document for row in rows(made, epoch) for piece in row)] for epoch in (0, 1, 0, 2)]
    assert orders[0] == orders[2]
    assert len({tuple(each) for each in orders}) == 3
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(50))


def test_rows_that_fit_are_nearly_full():
    lengths = np.minimum(np.random.default_rng(0).lognormal(3, 1, 3000).astype(int) + 2, 129)
    made = plan(lengths, "fit", 128, (0,))
    assert made.counts.efficiency > 0.995
    assert made.counts.filled_places == lengths.sum() == sum(places(made).values())


def best_fit_one_by_one(lengths, room):
    """Returns how full each bin becomes. Of bins that are equally full any may be taken: how full they become is the same."""
    bins = []
    for length in sorted(lengths, reverse=True):
        best = max((full for full in bins if full + length <= room), default=None)
        if best is not None:
            bins.remove(best)
        bins.append((best or 0) + length)
    return sorted(bins)


@settings(max_examples=60)
@given(st.lists(st.integers(2, 17), min_size=1, max_size=60).map(np.array))
def test_groups_of_bins_are_those_that_best_fit_decreasing_makes_one_by_one(lengths):
    made = plan(lengths, "fit", LENGTH, (0,))
    found = sorted(sum(piece.stop - piece.start for piece in row) for row in rows(made))
    assert found == best_fit_one_by_one(lengths.tolist(), LENGTH + 1)


def test_each_epoch_packs_anew_into_as_many_rows():
    lengths = np.random.default_rng(1).integers(2, 9, 200)
    made = plan(lengths, "fit", LENGTH, (0,))
    together = [{frozenset(piece.document for piece in row) for row in rows(made, epoch)} for epoch in (0, 1)]
    assert len(together[0]) == len(together[1]) == len(made)
    assert len(together[0] & together[1]) < len(made) / 4
    assert rows(made, 1) == rows(plan(lengths, "fit", LENGTH, (0,)), 1)
    assert rows(made, 1) != rows(plan(lengths, "fit", LENGTH, (1,)), 1)
    fixed = plan(lengths, "fit", LENGTH, (0,), shuffle=False)
    assert rows(fixed, 0) == rows(fixed, 1)


def test_a_document_longer_than_a_row_is_cut_or_split_or_dropped():
    lengths = np.array([40, 17, 5])
    of = {name: plan(lengths, "fit", LENGTH, (0,), overlong=name, shuffle=False) for name in ("cut", "split", "drop")}
    kept = {name: sorted(piece for row in rows(made) for piece in row) for name, made in of.items()}
    assert kept["cut"] == [(0, 0, 17), (1, 0, 17), (2, 0, 5)]
    assert kept["split"] == [(0, 0, 17), (0, 16, 33), (0, 32, 40), (1, 0, 17), (2, 0, 5)]
    assert kept["drop"] == [(1, 0, 17), (2, 0, 5)]
    assert {name: (made.counts.num_overlong, made.counts.lost_tokens) for name, made in of.items()} == {
        "cut": (1, 23),
        "split": (1, 0),
        "drop": (1, 40),
    }
    ends = plan(lengths, "fit", LENGTH, (0,), truncation="keep_end")
    assert (0, 23, 40) in [piece for row in rows(ends) for piece in row]


def test_many_documents_are_planned_at_once():
    """A count, not a clock: the plan grows with the lengths there are, and not with the documents."""
    lengths = np.tile(np.arange(2, 66), 5000)
    made = plan(lengths, "fit", 64, (0,))
    assert len(lengths) == 320_000
    assert len(made._groups) < 200
    assert len(made.pieces(3, len(made) - 1)) >= 1


def test_nothing_to_pack_makes_no_rows():
    for packing in ("concat", "fit", None):
        made = plan(np.array([0, 1, 1]), packing, LENGTH, (0,))
        assert (len(made), made.counts.num_short, made.counts.efficiency) == (0, 3, 0.0)


@pytest.mark.parametrize("size", [1, 2, 7, 1024, 1025, 3000])
def test_a_shuffle_is_a_permutation_that_depends_on_the_key(size):
    found = [shuffled(index, size, 3, 1) for index in range(size)]
    assert sorted(found) == list(range(size))
    if size > 2:
        assert found != [shuffled(index, size, 3, 2) for index in range(size)]
        assert found != [shuffled(index, size, 31, 0) for index in range(size)]


def test_orders_are_the_same_on_every_machine_and_for_good():
    assert [int(each) for each in digests(2, 1, 2)] == DIGESTS
    assert order(8, 5).tolist() == ORDER
    assert [shuffled(index, 2000, 1, 2) for index in range(4)] == SHUFFLED


DIGESTS = [8700920356863580379, 12865401247498695480]
ORDER = [2, 3, 1, 0, 7, 6, 5, 4]
SHUFFLED = [896, 429, 612, 773]


def test_the_orders_of_two_epochs_alone_are_kept():
    made = Concat(np.full(9, 5), LENGTH, (0,))
    for epoch in range(5):
        made.pieces(epoch, 0)
    assert sorted(made._streams) == [3, 4]

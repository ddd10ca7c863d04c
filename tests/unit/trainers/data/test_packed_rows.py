"""Packed rows: what is in them, which documents are held out, that all hosts together train on every document."""

from __future__ import annotations

import collections
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gangway.errors import DataError, DataMissingError
from tests.programs.packed import InMemory
from trainers.config import DataConfig
from trainers.config.arguments import TrainingArguments
from trainers.config.data import MixtureSource
from trainers.data.documents import Document
from trainers.data.packed_rows import split
from trainers.data.sources.packed import rows_of

LENGTH = 16


def arguments(seed=0, batch=8, **data):
    config = DataConfig(**{"sequence_length": LENGTH, "eval_fraction": 0.0, **data})
    return TrainingArguments(name="t", max_num_steps=1, seed=seed, global_batch_size=batch, data=config)


def lengths(source=0, number=40):
    return np.random.default_rng(source).integers(2, 24, number)


def three(seed=0, weights=(1.0, 1.0, 1.0), **data):
    mixture = tuple(MixtureSource(name=name, weight=weight) for name, weight in zip("abc", weights, strict=True))
    documents = [InMemory(lengths(source, 30 + 10 * source), source) for source in range(3)]
    return rows_of(documents, arguments(seed, mixture=mixture, **{"packing": "fit", "overlong": "split", **data}))


def row_lists(row):
    return {name: leaf.tolist() for name, leaf in row.items()}


def test_a_row_tells_its_documents_their_positions_and_what_counts():
    train, _ = rows_of([InMemory([3, 4, 5])], arguments(packing="fit", shuffle=False))
    assert row_lists(train[0]) == {
        "tokens": [14, 15, 16, 17, 18, 7, 8, 9, 10, 0, 1, 2, 0, 0, 0, 0, 0],
        "segments": [1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 0, 0, 0, 0, 0],
        "positions": [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 0, 0, 0, 0, 0],
        "token_weight": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0],
        "source": 0,
        "sample_id": 0,
    }
    assert {name: leaf.dtype for name, leaf in train[0].items()} == {
        name: np.float32 if name == "token_weight" else np.int32 for name in train[0]
    }


def test_positions_begin_anew_where_a_window_cuts_a_document():
    train, _ = rows_of([InMemory([40])], arguments(packing="concat", shuffle=False))
    assert [train[index]["tokens"].tolist() for index in range(2)] == [list(range(17)), list(range(16, 33))]
    assert train[1]["positions"].tolist() == list(range(17))
    assert train[2]["segments"].tolist() == [1] * 8 + [0] * 9


def test_without_packing_each_document_of_a_mixture_has_a_row():
    train, _ = three(packing=None, overlong="cut")
    assert len(train) == 30 + 40 + 50
    assert set(train[0]) == {"tokens", "token_weight", "source", "sample_id"}


@pytest.mark.parametrize("packing", ["fit", "concat"])
def test_shuffle_false_keeps_the_order_and_a_seed_makes_another(packing):
    def ids(**settings):
        train, _ = three(packing=packing, **settings)
        return [int(train[index]["sample_id"]) for index in range(len(train))]

    assert ids(shuffle=False, weights=(1.0, 0.0, 0.0))[:5] == [0, 1, 2, 3, 4]
    assert ids(seed=1) == ids(seed=1) != ids(seed=2)


def test_the_rows_are_shuffled_anew_each_epoch():
    train, _ = rows_of([InMemory(lengths())], arguments(packing="fit"))
    epochs = [[int(train[epoch * len(train) + index]["sample_id"]) for index in range(len(train))] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(len(train)))
    assert epochs[0] != epochs[1]


def test_held_out_documents_do_not_depend_on_seed_or_packing_and_are_none_of_the_training():
    documents = InMemory([10] * 200)
    train, held_out = split(documents, 0.1)
    assert (len(train), len(held_out)) == (180, 20)
    assert sorted([*train.indices, *held_out.indices]) == list(range(200))
    assert held_out.indices.tolist() == split(documents, 0.1)[1].indices.tolist()
    assert not np.array_equal(held_out.indices, np.arange(180, 200))
    np.testing.assert_array_equal(held_out[3].tokens, documents[int(held_out.indices[3])].tokens)
    for packing in ("fit", "concat"):
        for seed in (0, 1):
            _, rows = rows_of([documents], arguments(seed, packing=packing, eval_fraction=0.1))
            firsts = {
                int(rows[i]["tokens"][place]) for i in range(len(rows)) for place in np.flatnonzero(rows[i]["positions"] == 0)
            }
            assert firsts >= {7 * int(index) % 256 for index in held_out.indices}


@pytest.mark.parametrize("packing", ["fit", "concat"])
def test_the_held_out_rows_are_the_same_with_any_seed(packing):
    one, other = (three(seed, packing=packing, eval_fraction=0.5)[1] for seed in (1, 2))
    assert [row_lists(one[index]) for index in range(len(one))] == [row_lists(other[index]) for index in range(len(other))]


def test_one_document_of_few_is_held_out_and_one_is_left():
    assert [len(part) for part in split(InMemory([5, 5]), 0.01)] == [1, 1]
    assert [len(part) for part in split(InMemory([5]), 0.5)] == [1, 0]
    assert [len(part) for part in split(InMemory([5, 5, 5]), 0.0)] == [3, 0]


def test_held_out_rows_have_ids_and_sources_of_their_own():
    train, held_out = three(eval_fraction=0.2)
    ids = [int(train[index]["sample_id"]) for index in range(4 * len(train))]
    of_held_out = [int(held_out[index]["sample_id"]) for index in range(len(held_out))]
    assert sorted(of_held_out) == list(range(len(train), len(train) + len(held_out)))
    assert set(ids) == set(range(len(train)))
    assert {int(held_out[index]["source"]) for index in range(len(held_out))} == {0, 1, 2}


@settings(max_examples=25)
@given(
    seed=st.integers(0, 5),
    weights=st.lists(st.sampled_from([0.1, 0.5, 1.0, 3.0]), min_size=3, max_size=3),
    hosts=st.integers(1, 4),
    packing=st.sampled_from(["fit", "concat", None]),
)
def test_the_rows_of_all_hosts_are_the_global_batch_and_every_token_is_trained_on_once_an_epoch(seed, weights, hosts, packing):
    """Each host has read nothing but its own rows, of data that it has opened by itself."""
    batch, alone = 8, three(seed, weights, packing=packing)[0]
    readers = [three(seed, weights, packing=packing)[0] for _ in range(hosts)]
    parts = np.array_split(np.arange(batch), hosts)
    seen = [collections.Counter() for _ in range(3)]
    rows_of_source = [0, 0, 0]
    num_rows = max(len(each) / weight for each, weight in zip(alone.sources, weights, strict=True)) * sum(weights)
    for step in range(math.ceil(num_rows / batch) + 1):
        rows = [readers[host][step * batch + int(row)] for host in reversed(range(hosts)) for row in parts[host]]
        expected = [alone[step * batch + row] for row in range(batch)]
        assert sorted(map(repr, map(row_lists, rows))) == sorted(map(repr, map(row_lists, expected)))
        for row in expected:
            source = int(row["source"])
            if rows_of_source[source] < len(alone.sources[source]):  # of its first epoch
                seen[source].update(targets_of(row, source))
            rows_of_source[source] += 1
        for source, weight in enumerate(weights):
            assert abs(rows_of_source[source] - (step + 1) * batch * weight / sum(weights)) <= 2.6
    for source, found in enumerate(seen):
        assert found == expected_targets(InMemory(lengths(source, 30 + 10 * source), source))


def targets_of(row, source):
    """Returns the pairs of a token and its successor that the loss counts."""
    tokens, weight = row["tokens"], row["token_weight"][1:] > 0
    if "segments" in row:
        weight = weight & (row["segments"][1:] == row["segments"][:-1]) & (row["segments"][1:] > 0)
    return [(source, int(tokens[place]), int(tokens[place + 1])) for place in np.flatnonzero(weight)]


def expected_targets(documents):
    found = collections.Counter()
    for index in range(len(documents)):
        document = documents[index]
        weight = np.ones(len(document.tokens)) if document.token_weight is None else document.token_weight
        found.update(
            (documents.source, int(a), int(b))
            for a, b, counts in zip(document.tokens[:-1], document.tokens[1:], weight[1:], strict=True)
            if counts
        )
    return found


def held_weights(held, number):
    rows = [held[index] for index in range(number)]
    return np.array([sum(float(row["weight"]) for row in rows if row["source"] == source) for source in range(3)]), rows


def test_in_means_over_the_held_out_rows_each_source_counts_by_its_weight():
    _, held = three(weights=(3.0, 1.0, 0.0), eval_fraction=0.3)
    sums, rows = held_weights(held, len(held))
    assert sums / sums.sum() == pytest.approx([0.75, 0.25, 0.0])
    assert sums.sum() == pytest.approx(len(held))  # so that counts of targets stay what they are
    assert all(row["weight"] > 0 for row in rows)  # a source of weight 0 is measured by itself
    assert len({int(row["sample_id"]) for row in rows}) == len(held)


def test_the_first_part_of_the_held_out_rows_has_all_sources_in_these_proportions():
    _, held = three(weights=(1.0, 1.0, 2.0), eval_fraction=0.5)
    for number in range(12, len(held)):
        sums, _ = held_weights(held, number)
        assert sums / sums.sum() == pytest.approx([0.25, 0.25, 0.5], abs=0.15)


def test_held_out_rows_have_the_weights_of_the_last_step():
    weighted = [MixtureSource(name="a", weight=1, weight_at=((7, 3), (8, 9))), MixtureSource(name="b")]
    documents = [InMemory(lengths(source), source) for source in range(2)]
    made = arguments(mixture=tuple(weighted), packing="fit", overlong="split", eval_fraction=0.3)
    for steps, share in ((7, 0.5), (8, 0.75), (9, 0.9), (None, 0.9)):
        limit = {"max_num_steps": steps, "max_num_data_epochs": None if steps else 1}
        _, held = rows_of(documents, replace(made, **limit))
        sums, _ = held_weights(held, len(held))
        assert sums[0] / sums.sum() == pytest.approx(share)


def test_without_a_mixture_held_out_rows_have_no_weight():
    _, held = rows_of([InMemory(lengths())], arguments(packing="fit", eval_fraction=0.3))
    assert "weight" not in held[0]


def test_what_the_plan_made_of_the_documents_is_reported():
    train, _ = rows_of([InMemory([40, 10, 1])], arguments(packing="fit"))
    assert train.notes() == [
        "the data: 3 documents in 2 rows of 16 tokens, 79.41 % full; 1 longer than a row (23 of their tokens are left out); "
        "1 with less than two tokens left out"
    ]
    assert train.numbers() == {"packing_efficiency": 27 / 34, "overlong_documents": 1.0, "lost_tokens": 23.0}
    assert train.numbers_at(5) == {}


def test_the_epochs_of_each_source_are_counted():
    train, _ = three(weights=(2.0, 1.0, 1.0))
    rows = [len(source) for source in train.sources]
    assert train.numbers_at(80) == {"epoch/a": 40 / rows[0], "epoch/b": 20 / rows[1], "epoch/c": 20 / rows[2]}


def test_schedules_are_by_step_and_sources_leave_after_their_epochs():
    mixture = (
        MixtureSource(name="a", weight_at=((3, 0.0),)),
        MixtureSource(name="b", weight=0.0, weight_at=((3, 1.0),), epochs=2),
        MixtureSource(name="c", weight=0.0, weight_at=((3, 1.0),)),
    )
    documents = [InMemory([17] * 10, source) for source in range(3)]
    train, _ = rows_of(documents, arguments(batch=4, mixture=mixture, packing="fit"))
    sources = [int(train[index]["source"]) for index in range(100)]
    assert sources[:12] == [0] * 12
    assert collections.Counter(sources) == {0: 12, 1: 20, 2: 68}
    assert set(sources[12:50]) == {1, 2}
    assert set(sources[52:]) == {2}


def test_a_mixture_that_ends_is_an_epoch():
    mixture = tuple(MixtureSource(name=name, epochs=epochs) for name, epochs in (("a", 1.0), ("b", 2.0)))
    train, _ = rows_of([InMemory([17] * 10, source) for source in range(2)], arguments(mixture=mixture, packing="fit"))
    assert len(train) == 30
    found = collections.Counter((int(row["source"]), int(row["tokens"][0])) for row in map(train.__getitem__, range(30)))
    assert found == {(0, 7 * index): 1 for index in range(10)} | {(1, 97 + 7 * index): 2 for index in range(10)}


def test_a_source_without_rows_is_an_error_that_names_it():
    mixture = tuple(MixtureSource(name=name) for name in "ab")
    told = "b has no training rows: 2 documents, .* data.overlong = 'drop'"
    with pytest.raises(DataMissingError, match=told):
        rows_of([InMemory([9]), InMemory([100, 200])], arguments(mixture=mixture, packing="fit", overlong="drop"))
    with pytest.raises(DataMissingError, match="the data has no held-out rows: 1 documents"):
        rows_of([InMemory([9])], arguments(packing="concat", eval_fraction=0.1))


def test_a_document_that_has_changed_since_it_was_planned_is_an_error():
    class Changed(InMemory):
        def __getitem__(self, index):
            return Document(np.zeros(4, np.int32))

    train, _ = rows_of([Changed([5])], arguments(packing="fit"))
    with pytest.raises(DataError, match="document 0 of the data has 4 tokens, and had 5 when its rows were planned"):
        train[0]

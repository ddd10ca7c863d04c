"""The judgements of `verify`, on evidence made by hand."""

from dataclasses import replace

import pytest

from orchestrator.faultlab.verify.command import read_losses, shortened
from orchestrator.faultlab.verify.compare import (
    Evidence,
    Finding,
    changed_data,
    first_difference,
    judge_replayed,
    judge_resized,
    judge_resumed,
    judge_twice,
    loss_difference,
    passed,
    row_order,
)

WHERE = {"dataset": "my.data:make", "task": "my.task:Task", "trainer": "my.trainer:Trainer"}
BATCHES = {0: {"0.0": "a", "0.1": "b"}, 1: {"0.0": "c", "0.1": "d"}}
LEAVES = {10: {".params['w']": [1, 2], ".totals['samples_digest']": [3, 4]}}
SUMMARY = {"params_digest": "p", "samples_digest": "s", "incidents": [], "lineage": [{"num_hosts": 2}]}
PLAIN = Evidence(BATCHES, LEAVES, {5: 2.0, 10: 1.0}, SUMMARY)
OTHER_DATA = replace(PLAIN, batches={**BATCHES, 1: {"0.0": "c", "0.1": "x"}})
OTHER_STATE = replace(PLAIN, fingerprints={10: {**LEAVES[10], ".params['w']": [1, 9]}})
RESUMED = {**SUMMARY, "incidents": [{"resumed_step": 5}]}


def test_files_that_changed_between_two_runs_are_named():
    def seen(**files):
        about = {name: {"num_bytes": size, "digest": digest} for name, (size, digest) in files.items()}
        return {"files": about, "tokenizer": "t", "many": None}

    first = seen(a=(3, "x"), b=(4, "y"), c=(5, ""), d=(6, "z"))
    assert changed_data(first, first) == ""
    assert changed_data(first, seen(a=(3, "x"), b=(4, ""), c=(5, "w"), d=(6, "z"))) == ""  # not all digests are known
    assert changed_data(first, seen(a=(3, "v"), b=(5, "y"), c=(5, ""), e=(6, "z"))) == "d, e, a, b"
    assert changed_data(first, {**first, "tokenizer": "u"}) == "tokenizer"
    assert changed_data({}, {}) == ""  # of a trainer that records none


def told(finding):
    return finding.good, finding.at_fault


def test_the_first_different_batch_of_those_that_both_drew():
    assert first_difference(BATCHES, BATCHES, row_order) is None
    assert first_difference(BATCHES, {**BATCHES, 2: {"0.0": "z"}}, row_order) is None
    assert first_difference(BATCHES, OTHER_DATA.batches, row_order) == (1, "0.1")
    assert first_difference({0: {"0.2": "a", "0.10": "a"}}, {0: {"0.2": "b", "0.10": "b"}}, row_order) == (0, "0.2")


def test_a_row_that_differed_when_it_was_drawn_again_is_a_difference():
    assert first_difference(BATCHES, {**BATCHES, 1: {**BATCHES[1], "0.0 again": "y"}}, row_order) == (1, "0.0 again")


def test_the_first_different_leaf_of_the_first_different_step():
    assert first_difference(LEAVES, LEAVES) is None
    assert first_difference({5: {"a": 1}, **LEAVES}, {5: {"a": 1}, **OTHER_STATE.fingerprints}) == (10, ".params['w']")
    assert first_difference({5: {"a": 1}}, {5: {}}) == (5, "a")


def test_two_equal_runs_prove_that_the_step_is_deterministic():
    assert told(judge_twice(PLAIN, PLAIN, WHERE)) == (True, None)


def test_batches_that_differ_are_the_fault_of_the_data_even_if_the_state_differs_too():
    both = replace(OTHER_DATA, fingerprints=OTHER_STATE.fingerprints)
    finding = judge_twice(PLAIN, both, WHERE)
    assert told(finding) == (False, "data")
    assert finding.text.startswith("data: batch 1 differs in row 0.1 between two undisturbed runs")
    assert "my.data:make" in finding.text


def test_a_state_that_differs_on_the_same_batches_is_the_fault_of_the_step():
    finding = judge_twice(PLAIN, OTHER_STATE, WHERE)
    assert told(finding) == (False, "step")
    assert "first difference at step 10 in .params['w']" in finding.text
    assert "my.task:Task" in finding.text


def test_what_differs_only_at_the_end_is_found_too():
    ended = replace(PLAIN, summary={**SUMMARY, "params_digest": "q"})
    assert told(judge_twice(PLAIN, ended, WHERE)) == (False, "step")


def test_a_resumed_run_that_differs_is_the_fault_of_what_was_not_restored():
    killed = replace(OTHER_STATE, summary=RESUMED)
    finding = judge_resumed(PLAIN, killed, WHERE)
    assert told(finding) == (False, "restore")
    assert "resumed from step 5" in finding.text
    assert "my.trainer:Trainer" in finding.text
    assert told(judge_resumed(PLAIN, replace(PLAIN, summary=RESUMED), WHERE)) == (True, None)
    assert told(judge_resumed(PLAIN, replace(OTHER_DATA, summary=RESUMED), WHERE)) == (False, "data")


def test_a_run_that_was_not_resumed_proves_nothing():
    assert judge_resumed(PLAIN, PLAIN, WHERE).good is False
    from_zero = replace(PLAIN, summary={**SUMMARY, "incidents": [{"resumed_step": 0}]})
    assert judge_resumed(PLAIN, from_zero, WHERE).good is False


@pytest.mark.parametrize(
    ("losses", "good"), [({5: 2.0, 10: 1.0}, True), ({5: 2.0, 10: 1.005}, True), ({5: 2.0, 10: 1.5}, False), ({}, True)]
)
def test_on_fewer_hosts_losses_may_differ_by_the_tolerance(losses, good):
    assert judge_resized(PLAIN, replace(OTHER_STATE, losses=losses), 0.01, WHERE).good is good


def test_on_fewer_hosts_the_samples_must_be_the_same():
    assert told(judge_resized(PLAIN, OTHER_DATA, 0.01, WHERE)) == (False, "data")
    others = replace(PLAIN, summary={**SUMMARY, "samples_digest": "t"})
    assert told(judge_resized(PLAIN, others, 0.01, WHERE)) == (False, "data")


def test_a_replay_must_be_equal():
    assert told(judge_replayed(PLAIN, PLAIN, WHERE)) == (True, None)
    assert told(judge_replayed(PLAIN, OTHER_STATE, WHERE)) == (False, "restore")


def test_losses_are_compared_where_they_are_furthest_apart():
    assert loss_difference({1: 2.0, 2: 4.0}, {1: 2.1, 2: 4.1, 3: 9.0}) == (1, pytest.approx(0.05))
    assert loss_difference({1: 2.0}, {2: 2.0}) is None


def test_losses_that_are_means_over_other_steps_are_not_compared():
    """The second run stopped at step 21: what it published at step 25 leaves that step out."""
    undisturbed, stopped = {20: 1.3, 25: 0.95, 30: 0.69}, {20: 1.3, 21: 1.4, 25: 0.84, 30: 0.6899}
    assert loss_difference(undisturbed, stopped) == (30, pytest.approx(1e-4, rel=0.5))


def test_what_was_not_tried_does_not_fail():
    assert passed([Finding("a", True), Finding("b", None)])
    assert not passed([Finding("a", True), Finding("b", False)])


def test_losses_are_read_from_the_lines_of_tracking(tmp_path):
    lines = [
        '{"t": 1, "status": "RUNNING"}',
        '{"t": 1, "step": 5, "metrics": {"loss": 2.5}}',
        '{"t": 2, "step": 5, "metrics": {"eval_loss": 1}}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert read_losses(tmp_path / "metrics.jsonl") == {5: 2.5}


def test_a_shortened_run_saves_four_times_and_keeps_all():
    made = shortened(40)
    assert {"max_num_steps=40", "checkpoint.save_steps=10", "checkpoint.save_total_limit=40"} <= set(made)

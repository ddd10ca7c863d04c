"""Going on with changed settings: what has changed is told, by what it does to the training; what cannot work is refused."""

from __future__ import annotations

import re
import shutil

import pytest

from gangway.errors import UsageError
from tests.saved import saved
from tests.unit.training import arguments, trainer
from trainers.checkpoint import going_on
from trainers.checkpoint.going_on import ANOTHER, HARMLESS, ROUNDING
from trainers.data import identity
from trainers.planning import estimate


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The storage of a run that was stopped at step 6, and its meta."""
    storage = tmp_path_factory.mktemp("going_on")
    trainer(storage, max_num_steps=6).train()
    _, meta = going_on.newest(str(storage / "run"))
    return storage, meta


def changed(run, num_devices=None, **settings):
    storage, meta = run
    given = arguments(storage, **{"max_num_steps": 6, **settings})
    return {str(change): change.effect for change in going_on.changes(meta, given, num_devices)}


def test_with_the_same_settings_nothing_has_changed(run):
    assert changed(run) == {}
    assert going_on.notes(6, []) == ["goes on from step 6"]


@pytest.mark.parametrize(
    ("settings", "shown", "effect"),
    [
        ({"publish_every_steps": 5}, "publish_every_steps 1 -> 5", HARMLESS),
        ({"checkpoint": {"save_steps": 2}}, "checkpoint.save_steps 4 -> 2", HARMLESS),
        ({"evaluation": {"every_steps": 3}}, "evaluation.every_steps null -> 3", HARMLESS),
        ({"mesh": {"fsdp": 2}}, "mesh.fsdp 1 -> 2", ROUNDING),
        ({"accumulation_steps": 2}, "accumulation_steps 1 -> 2", ROUNDING),
        ({"seed": 1}, "seed 0 -> 1", ANOTHER),
        ({"model": {"fp8": "current"}}, 'model.fp8 "none" -> "current"', ANOTHER),
        ({"global_batch_size": 8}, "global_batch_size 16 -> 8", ANOTHER),
        ({"optimizer": {"name": "adamw", "learning_rate": 0.1}}, "optimizer.learning_rate 0.01 -> 0.1", ANOTHER),
        ({"max_num_steps": 9}, "max_num_steps 6 -> 9", ANOTHER),  # the schedule follows it
    ],
)
def test_a_changed_setting_is_reported_by_what_it_does(run, settings, shown, effect):
    assert changed(run, **settings) == {shown: effect}


def test_a_longer_run_is_the_same_experiment_if_its_schedule_does_not_follow(tmp_path):
    settings = {"optimizer": {"name": "adamw", "schedule": {"name": "constant"}}}
    trainer(tmp_path, max_num_steps=2, **settings).train()
    _, meta = going_on.newest(str(tmp_path / "run"))
    found = going_on.changes(meta, arguments(tmp_path, max_num_steps=3, **settings))
    assert [(str(change), change.effect) for change in found] == [("max_num_steps 2 -> 3", HARMLESS)]


def test_other_devices_are_reported(run):
    trained_on = run[1]["lineage"][-1]["num_devices"]
    assert changed(run, num_devices=trained_on) == {}
    assert changed(run, num_devices=trained_on + 1) == {f"devices {trained_on} -> {trained_on + 1}": ROUNDING}


def test_the_lines_for_a_user(run):
    storage, meta = run
    given = arguments(storage, max_num_steps=6, seed=1, publish_every_steps=2, data={"sequence_length": 8, "shuffle": False})
    lines = going_on.notes(6, going_on.changes(meta, given))
    assert lines[0] == "goes on from step 6"
    assert lines[1] == "changed, and harmless: publish_every_steps 1 -> 2"
    assert lines[2].startswith("changed, and no longer the same experiment: seed 0 -> 1; ")
    assert lines[2].endswith("another name, and init_from for the weights of this one)")


def test_a_run_that_begins_goes_on_from_nothing(tmp_path):
    assert going_on.newest(str(tmp_path / "run")) is None
    assert going_on.newest("gs://bucket/run") is None
    assert going_on.of_run(None, arguments(tmp_path)) == []


def test_a_half_written_checkpoint_does_not_count(tmp_path):
    trainer(tmp_path, max_num_steps=6, checkpoint={"save_steps": 3}).train()
    (saved(tmp_path / "run", 6) / "manifest.json").unlink()
    path, meta = going_on.newest(str(tmp_path / "run"))
    assert (path.name.partition("-")[0], meta["batch_index"]) == ("3", 3)


def test_the_plan_tells_of_a_checkpoint_that_was_committed_and_is_not_there(run, tmp_path):
    shutil.copytree(run[0] / "run", tmp_path / "run")
    shutil.rmtree(saved(tmp_path / "run", 6))
    problems, facts = estimate.plan(arguments(tmp_path, max_num_steps=6), run[1]["lineage"][-1]["num_devices"])
    assert problems == []  # the hosts may see it
    assert "checkpoint 6 of this run was committed, and is not in" in facts["doubt"]


def test_the_plan_tells_where_a_run_goes_on_and_what_has_changed(run):
    storage, meta = run
    num_devices = meta["lineage"][-1]["num_devices"]
    problems, facts = estimate.plan(arguments(storage, max_num_steps=6, seed=3), num_devices)
    assert problems == []
    assert facts["continues"]["step"] == 6
    assert facts["continues"]["notes"][0] == "goes on from step 6"
    assert "seed 0 -> 3" in facts["continues"]["notes"][1]
    assert "continues" not in estimate.plan(arguments(storage, name="other"), num_devices)[1]


def test_a_checkpoint_of_another_optimizer_is_refused_with_the_way_out(run):
    storage, meta = run
    other = arguments(storage, max_num_steps=6, optimizer={"name": "sgd", "learning_rate": 0.01})
    problems, _ = estimate.plan(other, meta["lineage"][-1]["num_devices"])
    (problem,) = problems
    assert "is a checkpoint of another model or optimizer" in problem
    assert f"begin with the parameters that fit by init_from={storage / 'run' / 'checkpoints' / '6'}" in problem


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"data": {"paths": ["DATA"], "dataset": "trainers.data.sources.text:text_windows"}}, identity.RECORDS),
        ({"data": {"mixture": [{"name": "a", "paths": ["DATA"]}]}}, identity.RECORDS),
        ({"optimizer": {"name": "rmsprop"}}, "what optimizer.name = 'rmsprop' does with optimizer.eps"),
    ],
)
def test_a_run_depends_on_the_rules_of_its_settings(tmp_path, settings, rule):
    assert identity.rules_of(arguments(tmp_path, max_num_steps=2, **settings)) == {rule: 2}
    assert identity.rules_of(arguments(tmp_path, max_num_steps=2)) == {}


def test_a_checkpoint_has_the_rules_of_its_run_and_a_resume_looks_at_them(tmp_path, monkeypatch):
    settings = {"optimizer": {"name": "rmsprop", "learning_rate": 0.01}}
    trainer(tmp_path, max_num_steps=2, **settings).train()
    _, meta = going_on.newest(str(tmp_path / "run"))
    (rule,) = meta[identity.KEY]["rules"]
    monkeypatch.setitem(identity.RULES, rule, 3)
    (prepared := trainer(tmp_path, max_num_steps=3, **settings)).prepare()
    for resume in (
        lambda: trainer(tmp_path, max_num_steps=3, **settings).train(),
        lambda: estimate.going_on_from(prepared, 8),
    ):
        said = rf"begun by another version of this program, .*: {re.escape(rule)}\. Go on with that version, or begin .*--fresh"
        with pytest.raises(UsageError, match=said):
            resume()
    before = prepared.batching.identity
    for rules, refused in (
        ({}, True),
        ({rule: 2}, True),
        ({rule: 3}, False),
    ):  # of an older version of the program, and of this one
        problem, _ = before.problem({**meta, identity.KEY: {**meta[identity.KEY], "rules": rules}}, pytest.fail)
        assert bool(problem) == refused
    monkeypatch.undo()
    trainer(tmp_path, max_num_steps=3, **settings).train()

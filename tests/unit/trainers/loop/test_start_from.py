"""A run that begins with the whole state of another run: `checkpoint.start_from`."""

from __future__ import annotations

import re
import shutil

import pytest

from gangway.errors import CheckpointError, UsageError
from tests.saved import saved
from tests.unit.training import FIXED, arguments, assert_equal, losses, of, trainer
from trainers.planning.estimate import plan

CUT = {"optimizer": FIXED, "max_num_steps": 8, "checkpoint": {"save_steps": 4}, "evaluation": {"max_batches": 1}}
NAMES = ("samples", "samples_digest", "steps", "tokens")


def beginning_with(tmp_path, source, **changes):
    return trainer(tmp_path, **{**CUT, "name": "next", "max_num_steps": 12, "checkpoint": {"start_from": source}, **changes})


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The folder of a run with checkpoints at steps 4 and 8, and the result of one that went on to 12."""
    folder = tmp_path_factory.mktemp("source")
    trainer(folder, **CUT).train()
    whole = trainer(folder / "whole", **{**CUT, "max_num_steps": 12})
    whole.train()
    return folder / "run", whole.output


def test_it_ends_as_the_other_run_would_have_from_its_newest_or_any_step(tmp_path, events, source):
    folder, whole = source
    for number, (path, step) in enumerate([(folder, 8), (folder / "4", 4), (saved(folder, 4), 4)]):
        events.clear()
        made = beginning_with(tmp_path / str(number), str(path))
        assert_equal(made.train(), whole.state)
        assert sorted(losses(events)) == list(range(step + 1, 13))
        assert [made.output.metrics[name] for name in NAMES] == [whole.metrics[name] for name in NAMES]
        told = f"checkpoint.start_from: the run begins with the whole state of {saved(folder, step)}, at step {step}"
        assert told in [event["message"] for event in of(events, "note")]


@pytest.mark.slow("trains three times")
def test_a_start_before_the_first_checkpoint_begins_the_same_and_its_own_checkpoint_wins(tmp_path, events, source):
    folder = tmp_path / "run"
    shutil.copytree(source[0], folder)
    shutil.move(saved(folder, 8), tmp_path / "8")
    never = {"start_from": str(folder), "save_at_end": False}
    beginning_with(tmp_path, str(folder), max_num_steps=5, checkpoint=never).train()
    shutil.move(tmp_path / "8", saved(folder, 8))
    events.clear()
    beginning_with(tmp_path, str(folder), max_num_steps=6).train()
    assert sorted(losses(events)) == [5, 6]
    shutil.rmtree(folder)  # no longer needed
    made = beginning_with(tmp_path, str(folder), max_num_steps=7)
    made.train()
    assert of(events, "restored")[-1]["step"] == 6
    assert not [event for event in of(events, "note") if "was not used" in event["message"]]
    beginning_with(tmp_path, str(tmp_path), max_num_steps=8).train()
    assert any(event["message"].startswith("checkpoint.start_from was not used") for event in of(events, "note"))


@pytest.mark.parametrize(
    ("path", "changes", "problem"),
    [
        ("run/5", {}, "there is no .*run/checkpoints/5"),
        ("run", {"optimizer": {"name": "sgd", "learning_rate": 0.1}}, "a checkpoint of another model or optimizer"),
        ("run/events", {}, "there is no .*run/events"),
    ],
)
def test_what_is_no_whole_state_of_the_model_is_found_by_the_plan(tmp_path, source, path, changes, problem):
    name = str(source[0].parent / path)
    made = arguments(tmp_path, **{**CUT, "checkpoint": {"start_from": name}, **changes})
    (told,) = plan(made, 1)[0]
    assert re.search(f"checkpoint.start_from: .*{problem}", told)


def test_parameters_alone_are_no_state(tmp_path, source):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="has parameters alone, and no whole state: begin with them by init_from="):
        beginning_with(tmp_path, str(tmp_path / "model.safetensors")).train()


def test_two_beginnings_are_an_error(tmp_path):
    with pytest.raises((UsageError, ValueError), match=r"expected null with checkpoint.start_from"):
        arguments(tmp_path, init_from="runs/a", checkpoint={"start_from": "runs/b"})

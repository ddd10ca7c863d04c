"""`init_from`: what is loaded, cast and left as it is; that a run finds the same again; what does not fit or is gone."""

from __future__ import annotations

import errno
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from gangway.errors import CheckpointError, CheckpointMissingError, CheckpointUnavailableError
from gangway.storage import durable
from gangway.storage.opening import place_of
from tests.saved import saved
from tests.unit.trainers.loop.test_skipped_batches import Poison
from tests.unit.training import FIXED, assert_equal, flip_a_byte, of, trainer
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.checkpoint import manifest, weights
from trainers.export import to_safetensors
from trainers.loop import init_from
from trainers.trainer.model_design import evaluated_parameters

NO_SAVES = {"optimizer": FIXED, "checkpoint": {"save_at_end": False}}


class FirstState(BaseTrainer):
    """Keeps a copy of the parameters that training begins with."""

    def on_training_start(self, state):
        self.first = {name: np.array(value) for name, value in state.params.items()}
        self.begun_at = (int(state.step), int(state.batch_index))
        return state


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run of another seed with checkpoints of steps 4 and 8, the parameters alone of step 4, and its exports."""
    folder = tmp_path_factory.mktemp("source")
    made = trainer(folder, seed=7, max_num_steps=8, checkpoint={"save_steps": 4, "save_total_limit": None})
    made.train()
    run = folder / "run"
    made.save_pretrained(str(run / "saved"))
    to_safetensors(saved(run, 8), run / "model.safetensors")
    alone = trainer(
        folder / "alone",
        seed=7,
        max_num_steps=8,
        checkpoint={"save_steps": 4, "save_total_limit": 1, "keep_every_steps": 4, "keep_model_only": "every"},
    )
    alone.train()
    return run, {name: np.asarray(value) for name, value in made.output.state.params.items()}


def begun(tmp_path, **settings):
    made = trainer(tmp_path, cls=FirstState, **{**NO_SAVES, "max_num_steps": 1, **settings})
    made.train()
    return made


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", ["", "checkpoints/8", "saved", "model.safetensors"])
def test_parameters_come_from_a_run_a_checkpoint_or_a_file(tmp_path, events, source, what):
    run, params = source
    made = begun(tmp_path, init_from=str(run / what), mesh={"fsdp": 8, "data": 1})
    for name, value in params.items():
        assert made.first[name].tobytes() == value.tobytes()
    assert made.begun_at == (0, 0)
    [note] = [event["message"] for event in of(events, "note") if event["message"].startswith("init_from: ")]
    path = saved(run, 8) if what in ("", "checkpoints/8") else run / what
    assert note.startswith(f"init_from: 2 of 2 parameters are those of {path} (step 8, digest ")


def test_what_was_loaded_is_not_in_memory_a_second_time(tmp_path, source, monkeypatch):
    load, loaded = init_from.load, []
    monkeypatch.setattr(init_from, "load", lambda *given: loaded.append(load(*given)) or loaded[0])
    begun(tmp_path, init_from=str(source[0]))
    assert loaded[0].arrays
    assert all(array.is_deleted() for array in loaded[0].arrays.values())


def test_parameters_come_from_a_checkpoint_of_the_parameters_alone(tmp_path, events, source):
    models = source[0].parents[0] / "alone" / "run" / "models"
    old = begun(tmp_path / "a", init_from=str(saved(models.parent, 4, "models"))).first
    assert_equal(old, begun(tmp_path / "b", init_from=str(saved(source[0], 4))).first)
    shutil.copytree(models, tmp_path / "only" / "models")  # a run of which nothing else is left
    assert_equal(old, begun(tmp_path / "c", init_from=str(tmp_path / "only")).first)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["checkpoints/8", "model.safetensors"])
def test_parameters_are_cast_to_the_type_of_the_model(tmp_path, events, source, what):
    run, params = source
    made = begun(tmp_path, task=f"{__name__}:Half", init_from=str(run / what))
    assert {leaf.dtype for leaf in made.first.values()} == {jnp.dtype(jnp.bfloat16)}
    for name, value in params.items():
        assert made.first[name].tobytes() == value.astype(jnp.bfloat16).tobytes()


def half_task():
    from flax import nnx

    from tests.programs.tiny import TableTask

    class Half(TableTask):
        def build_model(self, rngs):
            model = super().build_model(rngs)
            model.embed = nnx.Param(model.embed[...].astype(jnp.bfloat16))
            model.out = nnx.Param(model.out[...].astype(jnp.bfloat16))
            return model

    return Half


Half = half_task()


def test_some_parameters_are_loaded_and_the_others_begin_anew(tmp_path, events, source):
    run, params = source
    fresh = begun(tmp_path / "fresh").first
    made = begun(tmp_path / "some", init_from={"path": str(run), "include": ["embed", "out"], "exclude": ["ou.$"]})
    assert_equal(made.first, {"embed": params["embed"], "out": fresh["out"]})
    [note] = [event["message"] for event in of(events, "note") if event["message"].startswith("init_from: ")]
    assert note.endswith("; as in a new run: out")


@pytest.mark.parametrize("what", ["", "model.safetensors"])
def test_parameters_are_renamed(tmp_path, events, source, what):
    run, params = source
    rename = [["^embed$", "x"], ["^(o)ut$", r"\1ld"], ["^x$", "embed"], ["old", "out"]]
    assert_equal(begun(tmp_path, init_from={"path": str(run / what), "rename": rename}).first, params)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"rename": [["out", "head"]]}, "out is missing there; head is not in the model"),
        ({"rename": [["out", "embed"]]}, "embed and out are both embed here; out is missing there"),
        (
            {"rename": [["embed", "x"], ["out", "embed"], ["x", "out"]]},
            "embed is [16, 256] there and [256, 16] here; out is [256, 16] there and [16, 256] here",
        ),
        ({"include": ["nothing"]}, "include and exclude leave no parameter of the model"),
        ({"rename": [["^", "x."]], "strict": False}, "none of its parameters is in the model"),
    ],
)
def test_every_parameter_that_does_not_fit_is_named_in_one_error(tmp_path, events, source, settings, why):
    with pytest.raises(CheckpointError) as raised:
        begun(tmp_path, init_from={"path": str(source[0]), **settings})
    assert str(raised.value) == (
        f"init_from: {saved(source[0], 8)} does not fit the model: {why}; choose with init_from.include, exclude and rename"
    )


def test_without_strict_what_only_one_side_has_is_no_error(tmp_path, events, source):
    run, params = source
    fresh = begun(tmp_path / "fresh").first
    made = begun(tmp_path, init_from={"path": str(run), "rename": [["out", "head"]], "strict": False})
    assert_equal(made.first, {"embed": params["embed"], "out": fresh["out"]})


# ---------------------------------------------------------------------- the course of a run


def test_a_run_goes_on_from_its_own_checkpoint_and_keeps_what_it_began_with(tmp_path, events, source):
    settings = {"optimizer": FIXED, "init_from": str(source[0])}
    whole = trainer(tmp_path / "whole", **settings).train()
    trainer(tmp_path / "cut", max_num_steps=6, **settings).train()
    events.clear()
    resumed = trainer(tmp_path / "cut", **settings)
    assert_equal(whole, resumed.train())
    assert [event["message"] for event in of(events, "note") if "init_from" in event["message"]] == []
    meta = manifest.read_meta(place_of(saved(tmp_path / "cut" / "run", 12)))
    expected = {
        "path": str(source[0]),
        "include": [],
        "exclude": [],
        "rename": [],
        "strict": True,
        "checkpoint": str(saved(source[0], 8)),
    }
    assert {key: meta["init_from"][key] for key in expected} == expected
    assert len(meta["init_from"]["digest"]) == 64
    # Changed, or gone: the checkpoint of the run wins.
    events.clear()
    trainer(tmp_path / "cut", max_num_steps=13, optimizer=FIXED, init_from=str(tmp_path / "nothing")).train()
    assert of(events, "note")[0]["message"].startswith("init_from was not used: the run goes on from its checkpoint of step 12")


@pytest.mark.slow("trains twice")
def test_before_its_first_checkpoint_a_run_begins_with_the_same_again(tmp_path, events, source):
    """Also if the other run has a newer checkpoint by now; and not if that is gone, or another."""
    other = tmp_path / "other"
    shutil.copytree(source[0], other)
    newer = tmp_path / "newer"
    four, eight = saved(other, 4), saved(other, 8)
    eight.rename(newer)
    first = begun(tmp_path, init_from=str(other)).first
    newer.rename(eight)
    assert_equal(begun(tmp_path, init_from=str(other)).first, first)
    assert not np.array_equal(begun(tmp_path / "new", init_from=str(other)).first["out"], first["out"])
    shutil.copytree(eight, tmp_path / "eight")
    shutil.rmtree(four)
    with pytest.raises(
        CheckpointMissingError, match=rf"there is no .*checkpoints/{four.name}; the run began with it: bring it back"
    ):
        begun(tmp_path, init_from=str(other))
    shutil.move(tmp_path / "eight", four)
    with pytest.raises(CheckpointError, match=rf"checkpoints/{four.name} is not what it was; the run began with it"):
        begun(tmp_path, init_from=str(other))
    assert_equal(begun(tmp_path, init_from=str(source[0])).first, source[1])  # other settings: another beginning


@pytest.mark.slow("compiles a step and trains")
@pytest.mark.parametrize("course", ["one process", "restarted", "begun from the seed"])
def test_a_rollback_to_the_beginning_finds_it_again(tmp_path, events, source, course):
    """Also in a process that went on from a checkpoint, whatever its settings say by then."""
    settings = {"optimizer": FIXED, "max_num_steps": 6, "checkpoint": {"save_steps": 3}}
    init_from = None if course == "begun from the seed" else str(source[0])
    runtime.install(runtime.Runtime(events.append, skip_batches=[0, 1, 2, 3, 4]))
    ordered = trainer(tmp_path / "ordered", **settings, init_from=init_from).train()
    runtime.install(runtime.Runtime(events.append))
    rollback = {**settings, "anomalies": {"non_finite": "rollback", "skip_before": 4}}
    if course != "one process":
        trainer(tmp_path / "rolled", **{**rollback, "max_num_steps": 3}, init_from=init_from).train()
        init_from = str(source[0]) if init_from is None else str(tmp_path / "nothing")
    rolled = trainer(tmp_path / "rolled", Poison(4), **rollback, init_from=init_from)
    assert_equal(rolled.train(), ordered)
    assert [event["restored_step"] for event in of(events, "anomaly")] == [0]
    begun = rolled.lineage.init_from
    assert begun is None if course == "begun from the seed" else begun["checkpoint"] == str(saved(source[0], 8))


def test_what_is_given_to_train_comes_first(tmp_path, events, source):
    made = trainer(tmp_path, cls=FirstState, **NO_SAVES, init_from=str(source[0]))
    made.train(model_parameters={name: value + 1 for name, value in source[1].items()})
    assert_equal(made.first, {name: value + 1 for name, value in source[1].items()})
    assert of(events, "note")[0]["message"] == "init_from is not used: train was given a state or parameters"


# ---------------------------------------------------------------------- what is there


@pytest.mark.parametrize(("what", "why"), [("model", r"fingerprints differ"), ("saved", "digests differ")])
def test_damage_is_an_error_of_the_storage(tmp_path, events, source, monkeypatch, what, why):
    def without_digests(path, digest_up_to=0):
        return check_files(place_of(path), digest_up_to=digest_up_to)

    check_files = weights.check_files
    monkeypatch.setattr(weights, "check_files", without_digests)  # as for large files, unless there are no fingerprints
    shutil.copytree(
        saved(source[0].parent / "alone" / "run", 4, "models") if what == "model" else source[0] / what, tmp_path / "copy"
    )
    flip_a_byte(tmp_path / "copy" / "state")
    with pytest.raises(CheckpointUnavailableError, match=rf"the contents of .* are not those that were saved \({why}\)"):
        begun(tmp_path, init_from=str(tmp_path / "copy"))


def test_without_a_record_of_it_a_run_does_not_begin(tmp_path, events, source, monkeypatch):
    """A start before the first checkpoint could not find the same parameters again."""

    def full(path, *content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable, "write", full)
    monkeypatch.setattr(durable, "write_shared", full)
    with pytest.raises(CheckpointUnavailableError, match=r"init_from: OSError: .*No space left on device"):
        begun(tmp_path, init_from=str(source[0]))


@pytest.mark.parametrize(
    ("make", "error", "why"),
    [
        (lambda path: None, CheckpointMissingError, r"there is no .*/it$"),
        (lambda path: path.mkdir(), CheckpointError, "is no checkpoint: it has no manifest.json, no folder checkpoints of a run"),
        (lambda path: (path / "checkpoints").mkdir(parents=True), CheckpointError, "has no complete checkpoint yet"),
        (lambda path: path.write_text("text"), CheckpointError, r"is a file: expected a folder, or a file \.safetensors"),
    ],
)
def test_what_is_no_checkpoint_is_said(tmp_path, events, make, error, why):
    make(tmp_path / "it")
    with pytest.raises(error, match=why):
        begun(tmp_path, init_from=str(tmp_path / "it"))


def test_the_newest_whole_checkpoint_of_a_run_is_taken(tmp_path, events, source):
    copy = tmp_path / "copy"
    shutil.copytree(source[0], copy)
    (saved(copy, 8) / "manifest.json").unlink()
    made = begun(tmp_path, init_from=str(copy))
    assert made.lineage.init_from["checkpoint"] == str(saved(copy, 4))
    assert json.loads((tmp_path / "run" / "init_from.json").read_text())["begun"]["checkpoint"] == str(saved(copy, 4))


@pytest.mark.slow("trains more than once")
def test_averages_that_lie_in_the_optimizers_state_are_not_missed(tmp_path, events):
    optimizer = {"name": "schedule_free_adamw", "learning_rate": 0.01, "schedule": {"name": "constant"}}
    made = trainer(tmp_path / "source", max_num_steps=2, optimizer=optimizer)
    made.train()
    with pytest.raises(CheckpointError, match=r"is of schedule_free_adamw, whose averages are in the optimizer's state"):
        begun(tmp_path, init_from=str(tmp_path / "source" / "run"))
    to_safetensors(made.output.checkpoint_path, tmp_path / "model.safetensors")
    first = begun(tmp_path / "again", init_from=str(tmp_path / "model.safetensors")).first
    np.testing.assert_allclose(first["out"], evaluated_parameters(made.output.state)["out"], rtol=1e-5)

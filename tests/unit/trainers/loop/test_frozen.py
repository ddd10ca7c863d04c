"""Frozen weights as an input of the step: a teacher in a task's loss, where it comes from, and that it is the same again."""

from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gangway.errors import CheckpointError, CheckpointUnavailableError, UsageError
from gangway.storage.opening import place_of
from gangway.user_modules import load_object
from tests.saved import saved
from tests.unit.training import FIXED, arguments, assert_equal, flip_a_byte, losses, of, trainer
from trainers.checkpoint import manifest, weights
from trainers.export import to_safetensors
from trainers.loop.frozen import RECORD

DISTILL = {
    "task": "tests.programs.small_tokens:DistillTask",
    "optimizer": FIXED,
    "max_num_steps": 4,
    "mesh": {"fsdp": 8, "data": 1},
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run of another seed, with checkpoints of steps 4 and 8, and a file of the first."""
    folder = tmp_path_factory.mktemp("teacher")
    made = trainer(
        folder, seed=7, max_num_steps=8, checkpoint={"save_steps": 4, "save_total_limit": None, "model_every_steps": 8}
    )
    made.train()
    to_safetensors(saved(folder / "run", 4), folder / "run" / "4.safetensors")
    return folder / "run"


def distilled(storage, teacher, **changes):
    made = trainer(storage, **{**DISTILL, "frozen": {"teacher": teacher}, **changes})
    made.train()
    return made


@pytest.mark.slow("trains more than once")
def test_the_loss_is_that_of_a_direct_computation(tmp_path, events, teacher):
    made = distilled(tmp_path, str(teacher), max_num_steps=1)
    rows = [made.dataset_train[int(i)] for i in order_of_batch(made)]
    tokens = jnp.asarray(np.stack([row["tokens"] for row in rows]))[:, :-1]
    from trainers.step.state import initial_parameters

    first = jax.jit(lambda: initial_parameters(made.task, made.arguments.seed))()
    frozen = jax.device_get(made.frozen["teacher"])
    of_teacher, student = (jax.nn.log_softmax(jnp.tanh(p["embed"][tokens]) @ p["out"]) for p in (frozen, first))
    direct = jnp.mean(jnp.sum(jnp.exp(of_teacher) * (of_teacher - student), (1, 2)))
    assert losses(events)[1] == pytest.approx(float(direct), rel=1e-5)
    [note] = [event["message"] for event in of(events, "note") if "frozen" in event["message"]]
    assert note.startswith(f"frozen.teacher: 2 frozen weights are those of {saved(teacher, 8)} (digest ")


def order_of_batch(made):
    loader = made.configure_dataloaders().dataloader_train
    ids = np.asarray(loader.batch(0)["sample_id"]).reshape(-1)
    loader.close()
    return ids


@pytest.mark.slow("compiles a step and trains")
def test_the_teacher_is_no_part_of_the_checkpoint_and_named_there(tmp_path, events, teacher):
    made = distilled(tmp_path, str(teacher))
    meta = manifest.read_meta(place_of(saved(tmp_path / "run", 4)))
    assert sum("embed" in name for name in meta["shapes"]) == 3  # the student's, and its two moments
    assert meta["frozen"]["teacher"]["path"] == str(teacher)
    assert meta["frozen"]["teacher"]["checkpoint"] == str(saved(teacher, 8))
    assert RECORD.read(str(tmp_path / "run")) == meta["frozen"]
    # Not donated.
    for leaf in jax.tree.leaves(made.frozen):
        assert not leaf.is_deleted()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["checkpoints/4", "4.safetensors"])
def test_a_checkpoint_and_a_file_give_the_same_weights(tmp_path, events, teacher, what):
    made = distilled(tmp_path, {"path": str(teacher / what), "dtype": "bfloat16"}, max_num_steps=1)
    from trainers.export import from_safetensors

    expected = from_safetensors(teacher / "4.safetensors")
    assert_equal(made.frozen["teacher"], jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), expected))


@pytest.mark.slow("trains three times")
def test_a_run_goes_on_with_the_same_teacher_though_there_is_a_newer_one(tmp_path, events, teacher):
    moving = shutil.copytree(teacher, tmp_path / "moving")
    shutil.move(saved(moving, 8), tmp_path / "8")
    whole = distilled(tmp_path / "whole", str(moving))
    distilled(tmp_path / "cut", str(moving), max_num_steps=2, checkpoint={"save_steps": 2})
    shutil.move(tmp_path / "8", saved(moving, 8))
    cut = distilled(tmp_path / "cut", str(moving))
    assert_equal(whole.output.state, cut.output.state)
    with pytest.raises(CheckpointError, match=r"frozen\.teacher: the run has been trained with .*checkpoints/4-.* .*another one"):
        distilled(tmp_path / "cut", str(saved(moving, 8)), max_num_steps=6)


def test_a_damaged_teacher_is_not_trained_with(tmp_path, events, teacher, monkeypatch):
    check_files = weights.check_files
    # As for large files, whose digests are not computed.
    monkeypatch.setattr(
        weights, "check_files", lambda path, digest_up_to=0: check_files(place_of(path), digest_up_to=digest_up_to)
    )
    # Of the parameters alone: a whole checkpoint has the damage in a moment as likely.
    damaged = shutil.copytree(saved(teacher, 8, "models"), tmp_path / "damaged")
    flip_a_byte(damaged / "state")
    with pytest.raises(CheckpointUnavailableError, match=r"the contents of .* \(fingerprints differ\)"):
        distilled(tmp_path, str(damaged))


def test_a_teacher_that_does_not_fit_is_refused_before_a_machine_is_taken(tmp_path, teacher):
    from trainers.planning import estimate

    wrong = arguments(tmp_path, **{**DISTILL, "task": f"{__name__}:Wider", "frozen": {"teacher": str(teacher)}})
    problems, _ = estimate.plan(wrong, 8)
    assert any("frozen.teacher: " in line and "embed is [256, 16] there and [256, 24] here" in line for line in problems)
    gone = arguments(tmp_path, **{**DISTILL, "frozen": {"teacher": str(teacher / "nothing")}})
    problems, _ = estimate.plan(gone, 8)
    assert problems == [f"frozen.teacher: there is no {teacher}/nothing"]


def test_the_teacher_of_a_decoder_may_be_a_folder_of_another_family(tmp_path):
    from tests import ROOT
    from trainers.config import InitConfig
    from trainers.optim.param_groups import parameter_paths
    from trainers.step.frozen import frozen_models

    folder = str(ROOT / "tests" / "unit" / "data" / "parity" / "gemma2")
    made = arguments(tmp_path, task="trainers.tasks.causal_lm:CausalLMTask", frozen={"teacher": folder})
    model = frozen_models(load_object(made.task)(made), made)["teacher"]
    shapes = dict(zip(parameter_paths(model.shapes), (leaf.shape for leaf in jax.tree.leaves(model.shapes)), strict=True))
    assert weights.match(weights.open_model(weights.find(folder)), shapes, InitConfig(path=folder)).keys() == shapes.keys()


def test_a_step_of_ones_own_has_no_frozen_weights(tmp_path, teacher):
    from trainers.step import adapted

    with pytest.raises(UsageError, match="frozen: only the built-in step has frozen weights"):
        adapted.check_settings(arguments(tmp_path, frozen={"teacher": str(teacher)}))


def wider():
    from tests.programs.small_tokens import DistillTask
    from tests.programs.tiny import Table

    class Wider(DistillTask):
        def build_frozen(self, name, rngs):
            assert name == "teacher"
            return Table(24, rngs)

    return Wider


Wider = wider()

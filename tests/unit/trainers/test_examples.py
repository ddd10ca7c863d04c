"""The examples that are programs of their own: each as it stands, and what it prints."""

from __future__ import annotations

import json
import re
import runpy

import jax
import numpy as np
import pytest

from examples.vlm import COLOURS, QUESTIONS, SHAPES, PictureTrainer
from gangway.user_modules import load_object
from orchestrator.config.job import load
from tests import ROOT
from tests.unit.training import OneDevice, assert_equal, of
from trainers.step.state import initial_parameters


@pytest.mark.slow("trains an example")
def test_a_regression_on_arrays(capsys):
    made = runpy.run_module("examples.regression", run_name="__main__")
    printed = capsys.readouterr().out
    assert "python -m examples.regression" in made["__doc__"]
    assert made["result"].metrics["loss"] < 0.01
    found = re.search(r"stop_reason=max_steps\) sin\(2 \* 0.5\) is about \[([\d.]+)\]", printed)
    assert abs(float(found[1]) - 0.8415) < 0.1
    assert len((ROOT / "examples" / "regression.py").read_text().splitlines()) < 30


class OnOneDevice(OneDevice, PictureTrainer):
    """Compiles faster than for the 8 devices of the tests."""


@pytest.mark.slow("trains an example")
def test_a_model_that_sees_pictures_learns_with_its_encoder_frozen(tmp_path, events):
    changes = [
        "max_num_steps=60",
        "vision.num_layers=1",
        "model.num_layers=1",
        "evaluation.every_steps=null",
        "checkpoint.save_steps=null",
    ]
    arguments = load(ROOT / "examples" / "vlm.yaml", [f"storage={tmp_path}", *changes]).training
    assert load_object(arguments.trainer) is PictureTrainer
    trainer = OnOneDevice(arguments, *load_object(arguments.data.dataset)(arguments))
    params = trainer.train().params
    before = jax.jit(lambda: initial_parameters(trainer.task, arguments.seed))()
    assert_equal(params["vision"], before["vision"])
    assert np.abs(params["projector"]["out"] - before["projector"]["out"]).max() > 1e-3
    # The words were there before the first example was made of them, and lie beside the weights.
    words = trainer.model_assets["words"]
    assert words[arguments.vision.image_token] == "image"
    assert json.loads(next((tmp_path / "vlm").rglob("assets/**/words*")).read_text()) == words
    published = {event["step"]: event["metrics"] for event in of(events, "metrics") if "loss" in event["metrics"]}
    assert published[60]["loss"] < 0.5 * published[20]["loss"]
    # A group of its own: from another rate, by the same schedule.
    rates = [published[60][f"learning_rate{group}"] for group in ("", "/_projector")]
    assert rates[1] / rates[0] == pytest.approx(1e-2 / 3e-3)


def test_the_pictures_and_the_questions_are_those_of_the_answers():
    arguments = load(ROOT / "examples" / "vlm.yaml").training
    train, held = load_object(arguments.data.dataset)(arguments)
    about_colours = {example["question"]: example["answer"] in COLOURS for example in train}
    assert about_colours == {QUESTIONS[0]: True, QUESTIONS[1]: False}
    assert {example["answer"] for example in held} == {*COLOURS, *SHAPES}


def test_digits_for_a_vision_transformer_are_moved_for_training_alone():
    arguments = load(ROOT / "examples" / "vit_digits.yaml").training
    train, test = load_object(arguments.data.dataset)(arguments)
    assert (len(train), len(test)) == (5 * (1797 - 360), 360)
    assert {train[index]["label"].item() for index in range(5)} == {train[0]["label"].item()}
    np.testing.assert_array_equal(train[1]["image"], np.roll(train[0]["image"], 1, 1))
    assert (test[0]["image"].min(), test[0]["image"].max()) == (-1, 1)

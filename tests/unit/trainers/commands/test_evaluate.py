"""`python -m trainers.evaluate`: the numbers of training, from checkpoints on disk."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gangway.config.yaml_source import ConfigError
from gangway.storage.opening import place_of
from tests import ROOT
from tests.programs.processes import PATIENCE_S
from tests.saved import saved
from tests.unit.training import flip_a_byte, of, trainer
from trainers.base import BaseTrainer
from trainers.checkpoint.weights import Weights
from trainers.commands import evaluate, saved_models
from trainers.config.arguments import TrainingArguments, recorded_arguments
from trainers.export import to_safetensors

HERE = "tests.unit.trainers.commands.test_evaluate:"


class Marked(BaseTrainer):
    """A hook that adds the step to what is measured."""

    def on_evaluation_end(self, state, metrics):
        return state, {**metrics, "seen_at": float(self.info.global_step)}


UNITS = {"eval": {}, "few": {"max_batches": 1}}
PUBLISHED = ("loss", "accuracy", "perplexity", "seen_at")


@pytest.fixture
def trained(tmp_path, events):
    """(the configuration's file, the run's folder, what was published by step)"""
    changes = {
        "trainer": HERE + "Marked",
        "max_num_steps": 6,
        "evaluation": {"every_steps": 2, "units": UNITS, "score": {"metrics": ["eval_loss"]}},
        "checkpoint": {"save_steps": 2, "save_total_limit": 1, "keep_best": 2, "keep_model_only": "best"},
    }
    made = trainer(tmp_path, cls=Marked, **changes)
    made.train()
    published = {event["step"]: event["metrics"] for event in of(events, "metrics") if event.get("kind") == "eval"}
    base = {
        "name": "run",
        "storage": str(tmp_path),
        "task": "tests.programs.tiny:TableTask",
        "global_batch_size": 16,
        "data": {"sequence_length": 8, "dataset": "tests.programs.tiny:numbers"},
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
        "hosts": {"count": 2},
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**base, **changes}))
    return config, tmp_path / "run", published


def results(capsys, *arguments):
    assert evaluate.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def of_unit(published, unit):
    return {name: published[f"{unit}_{name}"] for name in PUBLISHED}


def files_below(folder):
    return {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*")}


def test_a_run_is_its_newest_checkpoint_and_gives_what_training_published(trained, capsys):
    config, folder, published = trained
    before = files_below(folder)
    rows = results(capsys, config, "--checkpoint", folder)
    assert [(row["step"], row["unit"], Path(row["checkpoint"]).name.partition("-")[0]) for row in rows] == [
        (6, "eval", "6"),
        (6, "few", "6"),
    ]
    for row in rows:
        assert row["metrics"] == pytest.approx(of_unit(published[6], row["unit"]), rel=1e-6)
        assert row["rates"]["seconds"] > 0
    assert files_below(folder) == before  # nothing is written


def test_several_checkpoints_those_of_the_parameters_alone_and_files(trained, capsys, tmp_path):
    config, folder, published = trained
    file, model = tmp_path / "model.safetensors", saved(folder, 4, "models")
    to_safetensors(saved(folder, 6), file)
    sources = [word for path in (model, saved(folder, 6), file) for word in ("--checkpoint", path)]
    rows = results(capsys, config, *sources, "--unit", "few")
    assert [(row["step"], row["unit"]) for row in rows] == [(4, "few"), (6, "few"), (None, "few")]
    assert rows[0]["metrics"] == pytest.approx(of_unit(published[4], "few"), rel=1e-6)
    assert rows[1]["metrics"] == pytest.approx(of_unit(published[6], "few"), rel=1e-6)
    assert rows[2]["metrics"]["loss"] == pytest.approx(published[6]["few_loss"], rel=1e-6)


def test_the_table_has_a_line_for_each_and_settings_may_be_changed(trained, capsys):
    config, folder, published = trained
    arguments = [str(config), "evaluation.units.eval.max_batches=1", "--checkpoint", str(folder), "evaluation.score=null"]
    assert evaluate.main([*arguments, "checkpoint.keep_best=null", "checkpoint.keep_model_only=none"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert {"checkpoint", "step", "unit", *PUBLISHED, "seconds"} == set(header.split())
    named = [dict(zip(header.split(), line.split(), strict=True)) for line in lines]
    assert [row["unit"] for row in named] == ["eval", "few"]
    assert all(row["loss"] == f"{published[6]['few_loss']:.6g}" for row in named)  # both have one batch now


def test_a_run_alone_is_measured_with_what_its_checkpoint_has_recorded(trained, capsys, tmp_path):
    _, folder, published = trained
    before = files_below(folder)
    assert evaluate.main([str(folder)]) == 2
    told = capsys.readouterr().err
    code = (HERE + "Marked", "tests.programs.tiny:TableTask", "tests.programs.tiny:numbers")
    assert {*told.partition("gangway's: ")[2].partition(". ")[0].split(", ")} == {*code}
    trusted = told.partition("have read it: ")[2].split()  # all of them at once
    for source in (folder, saved(folder, 6)):
        rows = results(capsys, source, *trusted)
        assert [(row["step"], row["unit"]) for row in rows] == [(6, "eval"), (6, "few")]
        assert rows[0]["metrics"] == pytest.approx(of_unit(published[6], "eval"), rel=1e-6)
    (row,) = results(capsys, folder, "evaluation.units.eval.max_batches=1", "--unit", "eval", *trusted)
    assert row["metrics"]["loss"] == pytest.approx(published[6]["few_loss"], rel=1e-6)
    assert files_below(folder) == before
    file = tmp_path / "model.safetensors"
    to_safetensors(saved(folder, 6), file)
    assert evaluate.main([str(file)]) == 2
    assert "has recorded no configuration: name one after it" in capsys.readouterr().err


@dataclasses.dataclass(frozen=True, kw_only=True)
class More(TrainingArguments):
    extra: int = 1


def test_the_class_of_the_arguments_is_recorded_and_what_was_masked_is_asked_for(tmp_path, monkeypatch):
    arguments = More(name="run", storage=str(tmp_path), max_num_steps=1, extra=3)
    recorded = recorded_arguments(arguments)
    assert recorded["arguments_class"] == HERE + "More"
    monkeypatch.setattr(saved_models, "look", lambda source: Weights(place_of(tmp_path), {}, "", meta=recorded))
    assert saved_models.recorded_with("run", ["seed=4"]) == dataclasses.replace(arguments, seed=4)
    recorded["arguments"]["data"]["paths"] = ["s3://***@bucket/a"]
    with pytest.raises(ConfigError, match=r"data\.paths\[0\]: masked, for it had a secret; give data\.paths=\[VALUE, \.\.\.\]"):
        saved_models.recorded_with("run", [])
    assert saved_models.recorded_with("run", ["data.paths=[s3://me:pass@bucket/a]"]).data.paths == ("s3://me:pass@bucket/a",)


class NoBase:
    pass


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--unit", "fwe"], "unit = 'fwe': expected one of eval, few"),
        (["global_batch_sise=8"], "override: global_batch_sise: unknown key (found 8); did you mean global_batch_size?"),
        (["evaluation"], "'evaluation': expected key=value"),
        (["seed.x=1"], "'seed.x=1': seed is not a section"),
        (["seed=[1"], 'override: seed: expected an integer (found "[1")'),
        ([f"trainer={HERE}NoBase"], "expected a subclass of trainers.base.BaseTrainer"),
        (["optimizer.name=sgd"], "another model or optimizer"),
    ],
)
def test_what_is_wrong_is_reported_in_one_line(trained, capsys, more, problem):
    config, folder, _ = trained
    config.write_text(config.read_text() + "seed: 3\n")
    assert evaluate.main([str(config), "--checkpoint", str(folder), *more]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    first, error, *_ = told.err.splitlines()
    assert first == f"evaluating {folder}"
    assert error.startswith("error: ")
    assert problem in told.err


def test_a_checkpoint_that_is_not_there_or_damaged_is_reported(trained, capsys):
    config, folder, _ = trained
    assert evaluate.main([str(config), "--checkpoint", str(folder / "gone")]) == 2
    assert "there is no " in capsys.readouterr().err
    flip_a_byte(saved(folder, 6))
    assert evaluate.main([str(config), "--checkpoint", str(folder)]) == 2
    assert "is not whole" in capsys.readouterr().err


def test_without_held_out_data_there_is_nothing_to_evaluate(trained, capsys):
    config, folder, _ = trained
    arguments = [f"data.dataset={HERE}no_held_out", "evaluation={}", "checkpoint={}"]
    assert evaluate.main([str(config), "--checkpoint", str(folder), *arguments]) == 2
    assert "there is no held-out data to evaluate on" in capsys.readouterr().err


def no_held_out(arguments):
    from tests.programs.tiny import Numbers

    return Numbers(96, arguments.data.sequence_length), None


def test_numbers_that_are_not_finite_are_null_in_json():
    row = evaluate.Result("x", 1, "eval", {"loss": float("nan")}, {"seconds": 1.0})
    assert json.loads(evaluate.as_json([row]))[0]["metrics"] == {"loss": None, "loss_not_finite": "nan"}


@pytest.mark.slow("trains, and runs a command")
def test_the_command_prints_the_results_alone(trained):
    config, folder, _ = trained
    command = [sys.executable, "-m", "trainers.evaluate", str(config), "--checkpoint", str(folder), "--json"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    env.pop("XLA_FLAGS", None)  # one device, not the eight of the training
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert [row["unit"] for row in json.loads(done.stdout)] == ["eval", "few"]

"""The examples, each as its configuration file says, by the real orchestrator; the first two on two hosts."""

from __future__ import annotations

import pytest
import ray

from orchestrator.config.job import ConfigError, load, to_dict
from tests import ROOT
from tests.ray.jobs import run_job
from trainers.base import BaseTrainer
from trainers.config.arguments import load_object
from trainers.protocol import TrainerProtocol

EXAMPLES = {path.stem: path for path in (ROOT / "examples").glob("*.yaml")}


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def run(name, tmp_path, *overrides):
    config = load(
        EXAMPLES[name], [f"storage={tmp_path}", f"data.paths=[{ROOT / 'examples'}]", "tracking.mlflow=false", *overrides]
    )
    return run_job(to_dict(config))


def hosts(run_dir):
    """How many took part: each has a folder of logs."""
    return len(list((run_dir / "logs").iterdir()))


def test_a_trainer_that_inherits_nothing_trains_on_two_hosts(tmp_path):
    trainer = load_object(load(EXAMPLES["custom_trainer"]).training.trainer)
    assert trainer.__mro__ == (trainer, object)
    assert isinstance(trainer(None, None, None), TrainerProtocol)
    summary = run("custom_trainer", tmp_path)
    assert (summary["status"], summary["steps"], hosts(tmp_path / "custom_trainer")) == ("finished", 40, 2)
    assert summary["eval_loss"] < 0.01
    assert summary["checkpoint"] == str(tmp_path / "custom_trainer" / "40.json")


def test_a_trainer_that_overrides_one_configure_method_trains_on_two_hosts(tmp_path):
    trainer = load_object(load(EXAMPLES["subclass"]).training.trainer)
    assert issubclass(trainer, BaseTrainer)
    assert [name for name in vars(trainer) if not name.startswith("__")] == ["configure_dataloaders"]
    summary = run("subclass", tmp_path)
    assert (summary["status"], summary["steps"], hosts(tmp_path / "subclass")) == ("finished", 20, 2)
    assert summary["lineage"][0]["num_hosts"] == 2
    plain = run("subclass", tmp_path, "name=plain", "trainer=trainers.base:BaseTrainer", "hosts.count=1")
    assert summary["samples"] == plain["samples"]
    assert summary["samples_digest"] != plain["samples_digest"]


def test_a_callback_of_ones_own_sees_the_run(tmp_path):
    assert run("callback", tmp_path)["status"] == "finished"
    line = (tmp_path / "callback" / "loss_line.txt").read_text()
    assert len(line) == 20
    assert "@" in line[:5]
    assert " " in line[10:]


def test_arguments_of_ones_own_are_reached_by_the_file_and_the_command_line(tmp_path):
    path = EXAMPLES["extended_arguments"]
    assert load(path).training.smoothing.amount == 0.05
    assert load(path, ["smoothing.amount=0.2"]).training.smoothing.amount == 0.2
    with pytest.raises(ConfigError, match=r"smoothing\.amont: .*amount"):
        load(path, ["smoothing.amont=0.2"])
    with pytest.raises(ConfigError, match=r"smoothing\.warmup_steps: expected an integer"):
        load(path, ["smoothing.warmup_steps=many"])
    with pytest.raises(ConfigError, match=r"amount = 2.*: expected 0 <= amount < 1"):
        load(path, ["smoothing.amount=2"])
    summary = run("extended_arguments", tmp_path, "smoothing.amount=0.2")
    assert summary["status"] == "finished"
    published = (tmp_path / "extended_arguments" / "tracking" / "metrics.jsonl").read_text()
    assert '"smoothing": 0.2' in published


@pytest.mark.parametrize("name", [path.stem for path in (ROOT / "examples").glob("[a-z]*.py")])
def test_each_example_is_short_and_has_a_configuration(name):
    assert name in EXAMPLES
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 60
    assert load(EXAMPLES[name]).training.name == name

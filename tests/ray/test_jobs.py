"""Whole jobs under the driver: trainers of one's own, errors of the user, too few machines."""

from __future__ import annotations

import pytest
import ray

from orchestrator.board import Board
from tests.programs.recorder import OwnTrainer
from tests.ray.jobs import run_job, settings
from trainers.protocol import TrainerProtocol


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_a_trainer_that_only_implements_the_protocol_is_run_and_restarted(tmp_path):
    assert isinstance(OwnTrainer(None, None, None), TrainerProtocol)
    summary = run_job(settings(tmp_path, trainer="tests.programs.recorder:OwnTrainer"))
    assert summary["status"] == "finished"
    assert summary["steps"] == 6
    assert [(i["kind"], i["resumed_step"]) for i in summary["incidents"]] == [("user_error", 4)]
    assert (tmp_path / "own" / "log").read_text().split() == [str(tmp_path / "own" / "4")] * 2


def test_an_error_of_the_user_is_tried_twice_and_shown_once_with_its_traceback(tmp_path):
    board = Board()
    summary = run_job(settings(tmp_path, trainer="tests.programs.recorder:Stubborn"), board)
    assert summary["status"] == "failed"
    assert summary["generations"] == 2
    assert "KeyError: 'a mistake of the user'" in summary["error"]
    assert summary["error"].count("Traceback") == 1
    assert "in train\n    raise KeyError" in summary["error"]
    assert "RayTaskError" not in summary["error"]


def test_bad_data_gives_up_at_once(tmp_path):
    made = settings(tmp_path, data={"paths": [str(tmp_path / "nothing-here")], "sequence_length": 16})
    summary = run_job(made)
    assert summary["status"] == "failed"
    assert summary["generations"] == 1
    assert "nothing-here" in summary["error"]
    assert "Traceback" not in summary["error"]


def test_a_checkpoint_of_another_model_gives_up_at_once(tmp_path):
    assert run_job(settings(tmp_path))["status"] == "finished"
    summary = run_job(
        settings(tmp_path, model={"width": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "mlp_width": 64})
    )
    assert summary["status"] == "failed"
    assert summary["generations"] == 1
    assert "is a checkpoint of another model or optimizer" in summary["error"]
    assert "give the run another name" in summary["error"]


def test_more_hosts_than_the_cluster_has(tmp_path):
    summary = run_job(settings(tmp_path, hosts={"count": 8, "start_timeout_s": 2}))
    assert summary["status"] == "failed"
    assert summary["generations"] == 0
    assert "could not be had within 2 s" in summary["error"]
    assert "CPU" in summary["error"]
    assert ray.available_resources()["CPU"] == 4

"""Whole jobs under the driver: trainers of one's own, errors of the user, too few machines."""

from __future__ import annotations

import json
import re

import pytest
import ray

from orchestrator.reporting.board import Board
from tests.programs.recorder import OwnTrainer
from tests.ray.jobs import LANGUAGE_MODEL, run_job, settings
from tests.ray.machines import own_ray
from trainers.protocol import TrainerProtocol

WINGS = ("orchestrator/driver", "orchestrator/failures", "cluster/agent", "trainers/worker.py", "trainers/runtime")


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    with own_ray(4):
        yield


def test_a_trainer_that_only_implements_the_protocol_is_run_and_restarted(tmp_path):
    assert isinstance(OwnTrainer(None, None, None), TrainerProtocol)
    summary = run_job(settings(tmp_path, trainer="tests.programs.recorder:OwnTrainer"))
    assert summary["status"] == "finished"
    assert summary["steps"] == 6
    assert [(i["kind"], i["resumed_step"]) for i in summary["incidents"]] == [("user_error", 4)]
    assert (tmp_path / "own" / "log").read_text().split() == [str(tmp_path / "own" / "4")] * 2


@pytest.mark.slow("a whole job; what is decided is tested by simulation")
def test_an_error_of_the_user_is_tried_twice_and_shown_once_with_its_traceback(tmp_path):
    board = Board()
    summary = run_job(settings(tmp_path, trainer="tests.programs.recorder:Stubborn"), board)
    assert summary["status"] == "failed"
    assert summary["generations"] == 2
    assert "KeyError: 'a mistake of the user'" in summary["error"]
    assert summary["error"].count("Traceback") == 1
    assert "in train\n    raise KeyError" in summary["error"]
    assert "RayTaskError" not in summary["error"]


@pytest.mark.slow("trains a whole job")
def test_data_that_were_never_there_are_reported_at_the_second_try(tmp_path):
    made = settings(tmp_path, data={"paths": [str(tmp_path / "nothing-here")], "sequence_length": 16})
    summary = run_job(made)
    assert summary["status"] == "failed"
    assert summary["generations"] == 2
    assert "nothing-here" in summary["error"]
    assert "the same data_error at the start twice in a row: it looks like a mistake" in summary["error"]
    assert "Traceback" not in summary["error"]


@pytest.mark.slow("trains a whole job")
def test_a_data_server_that_is_away_for_a_while_is_waited_for(tmp_path):
    board = Board()
    made = settings(tmp_path, data={"dataset": "tests.programs.away:byte_text", "paths": [__file__], "sequence_length": 16})
    made["hosts"]["env"] = {"AWAY": json.dumps({"folder": str(tmp_path), "times": 3})}
    summary = run_job(made, board)
    assert (summary["status"], summary["steps"]) == ("finished", 6)
    kinds = {incident["kind"] for incident in summary["incidents"]}
    assert kinds == {"transient_error"}
    assert len(summary["incidents"]) >= 2
    told = [event["message"] for event in board.read(0, 0.0)[1] if event["ev"] == "status" and "message" in event]
    assert any(
        re.match(r"trying again in .* at most: host \d: ConnectionRefusedError.*the data server is away", line) for line in told
    )


@pytest.mark.slow("trains a whole job")
def test_a_checkpoint_of_another_model_gives_up_at_once(tmp_path):
    assert run_job(settings(tmp_path, **LANGUAGE_MODEL))["status"] == "finished"
    wider = {**LANGUAGE_MODEL["model"], "width": 64}
    summary = run_job(settings(tmp_path, **{**LANGUAGE_MODEL, "model": wider}))
    assert summary["status"] == "failed"
    assert summary["launch"]["generations"] == 1
    assert "is a checkpoint of another model or optimizer" in summary["error"]
    assert "give the run another name" in summary["error"]


def test_more_hosts_than_the_cluster_has(tmp_path):
    summary = run_job(settings(tmp_path, hosts={"count": 8, "start_timeout_s": 2}))
    assert summary["status"] == "failed"
    assert summary["generations"] == 0
    assert "could not be had within 2 s" in summary["error"]
    assert "CPU" in summary["error"]
    assert ray.available_resources()["CPU"] == 4

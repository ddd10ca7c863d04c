"""On two hosts: previews, of which one fails on one host alone; the look for the first non-finite value, which all hosts take."""

from __future__ import annotations

import pytest

from tests.multihost import harness
from tests.multihost.test_hosts import arguments

WINGS = ("trainers/evaluation", "trainers/diagnostics")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("previews")
    made = arguments(
        folder,
        task="tests.programs.mute:MuteTask",
        mesh={"data": 2, "fsdp": 2, "tensor": 2},
        previews={"every_steps": 2, "prompts": ["def ", "a"], "num_tokens": 5, "greedy": True},
        data={"sequence_length": 16, "paths": [harness.__file__], "eval_fraction": 0.2, "shuffle": False},
    )
    return harness.run(made, folder / "logs", hosts=2, devices_per_host=4)


@pytest.mark.slow("starts the processes of several hosts")
def test_a_preview_that_fails_on_one_host_is_reported_and_all_go_on(hosts):
    notes = [event["message"] for event in hosts[0].of("note")]
    assert "no previews at step 2: host 1: RuntimeError: no words for it" in notes
    assert [event["step"] for event in hosts[0].of("preview")] == [4, 6]
    assert hosts[1].of("preview") == []  # host 0 tells for all
    assert [shown["prompt"] for shown in hosts[0].of("preview")[0]["previews"]] == ["def ", "a"]
    samples = [harness.result(host)["sample"] for host in hosts]
    assert samples[0] == samples[1]
    assert samples[0].startswith("def ")


@pytest.mark.slow("starts the processes of several hosts")
def test_the_first_non_finite_value_is_found_by_all_and_reported_by_host_0(hosts):
    (note,) = (event["message"] for event in hosts[0].of("note") if event["message"].startswith("batch 2: "))
    assert "is made by penalty, operation exp (tests/programs/mute.py:" in note
    assert "in MuteTask.loss), micro-batch 1, with the parameters of step" in note
    assert [harness.result(host)["skipped_batches"] for host in hosts] == [[2], [2]]
    assert not [event for event in hosts[1].of("note") if "penalty" in event["message"]]

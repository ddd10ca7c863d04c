"""The summary of a run: what it measured, when and where it ran, and with which versions and configuration."""

from __future__ import annotations

import hashlib
import json
import sys
from datetime import datetime
from importlib import metadata

from orchestrator.run_state import launch as launches
from orchestrator.run_state import summary
from orchestrator.tracking.config import TrackingConfig

RESULT = {
    "stop_reason": "max_steps",
    "steps": 10,
    "evaluation": {"eval_loss": 1.5, "eval_accuracy": 0.5},
    "throughput": {"tokens_per_s": 1000.0},
    "lineage": [{"batch_index": 0, "num_hosts": 2, "num_devices": 4}, {"batch_index": 5, "num_hosts": 3, "num_devices": 6}],
}


def built(tmp_path, result, configuration):
    launch = launches.open_launch(str(tmp_path), "launch", 1000.0, TrackingConfig(mlflow=False), {}, lambda: 1000.0)
    document = summary.build(launch, "finished", result, None, 1090.0, configuration)
    launch.close("FINISHED", 30.0)
    return document


def test_it_has_what_the_run_measured_and_where_and_when_it_ran(tmp_path):
    found = built(tmp_path, RESULT, {"seed": 1})
    assert found["evaluation"] == {"eval_loss": 1.5, "eval_accuracy": 0.5}
    assert found["throughput"] == {"tokens_per_s": 1000.0}
    assert (found["hosts"], found["devices"]) == (3, 6)
    assert (found["started_at"], found["ended_at"]) == ("1970-01-01T00:16:40+00:00", "1970-01-01T00:18:10+00:00")
    assert (datetime.fromisoformat(found["ended_at"]) - datetime.fromisoformat(found["started_at"])).total_seconds() == 90
    assert json.loads(json.dumps(found)) == found


def test_versions_are_those_that_are_installed(tmp_path, monkeypatch):
    about = tmp_path / "gangway-9.8.7.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: gangway\nVersion: 9.8.7\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = built(tmp_path, RESULT, {})["versions"]
    assert found["gangway"] == "9.8.7"
    assert found["python"] == sys.version.partition(" ")[0]
    for name in ("jax", "ray", "orbax-checkpoint"):
        assert found[name] == metadata.version(name)


def test_equal_configurations_have_equal_digests(tmp_path):
    one, same, other = (
        built(tmp_path / str(number), RESULT, configuration)["configuration_digest"]
        for number, configuration in enumerate(({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1, "b": 3}))
    )
    assert one == same != other
    assert one == hashlib.sha256(b'{"a": 1, "b": 2}').hexdigest()


def test_a_run_that_never_trained_has_a_summary_too(tmp_path):
    found = built(tmp_path, {}, {})
    assert (found["hosts"], found["evaluation"], found["steps"]) == (None, None, 0)

"""A machine of the cluster lacks code: the error says which module, which machine, where it was searched, and what to do."""

from __future__ import annotations

import os

import pytest
import ray

from orchestrator.commands.launching import exit_status
from orchestrator.failures import classify
from tests.ray.fake import FakeNode, cluster_of
from tests.ray.jobs import run_job, settings

WINGS = ("cluster/agent", "orchestrator/failures", "orchestrator/shipped")

pytestmark = pytest.mark.slow("starts Ray nodes")

WITHOUT = """
import os, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["NOT_ON_THIS_MACHINE"]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
HOSTS = {"count": 2, "spread": True, "cpus_per_host": 1}


@pytest.fixture
def without(tmp_path):
    """A node on whose machine a module is not installed."""
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "sitecustomize.py").write_text(WITHOUT)
    path = os.pathsep.join(filter(None, [str(tmp_path / "without"), os.environ.get("PYTHONPATH")]))
    return lambda module: FakeNode(env={"PYTHONPATH": path, "NOT_ON_THIS_MACHINE": module})


def test_a_module_of_the_user_that_one_machine_lacks(tmp_path, without):
    with cluster_of([FakeNode(), without("tests.programs.tiny")], log_to_driver=False):
        summary = run_job(settings(tmp_path, hosts=HOSTS))
    assert (summary["status"], summary["steps"]) == ("failed", 0)
    for part in ("No module named 'tests.programs.tiny'", "CodeMissingError", "searched: '", "ray job submit --working-dir ."):
        assert part in summary["error"], summary["error"]
    assert str(os.getcwd()) in summary["error"]
    assert "Traceback" not in summary["error"]
    (host,) = {incident["host"] for incident in summary["incidents"]}
    assert summary["error"].startswith(f"host {host}: ")


def test_the_project_itself_is_missing_on_a_machine(tmp_path, without):
    with cluster_of([FakeNode(), without("cluster")], log_to_driver=False):
        address = ray.util.get_node_ip_address()
        summary = run_job(settings(tmp_path, hosts=HOSTS))
    assert summary["status"] == "failed"
    assert f"no module named 'cluster' on the machine {address}: every host needs the same code" in summary["error"]
    assert "Traceback" not in summary["error"]


def test_another_error_is_not_taken_for_missing_code():
    assert classify.explain_missing_code("ModuleNotFoundError: nothing of that kind") is None
    assert classify.explain_missing_code("ValueError: No module named 'x'") is None


def test_the_driver_itself_lands_on_a_machine_without_the_code(capsys):
    error = RuntimeError("ray::_worker() (pid=7, ip=10.0.0.3)\nModuleNotFoundError: No module named 'orchestrator'")
    assert exit_status(None, error, None) == 1
    assert "error: no module named 'orchestrator' on the machine 10.0.0.3: every host needs" in capsys.readouterr().err

"""Which launches are nested runs of MLflow, and that the final model is one version: with stand-ins for MLflow."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from gangway.storage.opening import place_of
from gangway.storage.store import StorageProblem
from orchestrator.config import job
from orchestrator.tracking import mlflow_shipper, registration
from orchestrator.tracking.config import TrackingConfig, own_store
from orchestrator.tracking.mlflow_shipper import Shipper
from orchestrator.tracking.registration import RegistrationError, register
from orchestrator.tracking.tracker import Tracker
from tests.saved import saved
from tests.stores.fault_proxy import Fault

FIRST = {"max_num_steps": 10, "optimizer": {"learning_rate": 0.1}, "storage": "/a"}
SECOND = {"max_num_steps": 20, "optimizer": {"learning_rate": 0.1}, "storage": "/b"}


class FakeRun:
    found, run_id = True, "parent"

    def __init__(self):
        self.made, self.sent = {}, []

    def send_record(self, record):
        self.sent.append(record)

    def send_values(self, values): ...

    def nested(self, launch, name, params, began_s):
        return self.made.setdefault(launch, {"name": name, "params": params, "began_s": began_s}) and launch

    def end_nested(self, run_id, status, at_s):
        self.made[run_id] |= {"status": status, "at_s": at_s}

    def register(self, record):
        self.sent.append(record)
        return f"models:/{record['model']}/1"

    def answers(self):
        return True


@pytest.fixture
def run(monkeypatch):
    fake = FakeRun()
    monkeypatch.setattr(mlflow_shipper, "MlflowRun", lambda folder: fake)
    return fake


def ship(folder):
    drain = threading.Event()
    drain.set()
    assert Shipper(str(folder / "tracking"), drain).ship() == 0


def launched(folder, launch, params, at_s, status="FINISHED", drivers=1):
    """The lines of a launch: None as its status, if it was never told."""
    for _ in range(drivers):
        tracker = Tracker(str(folder), TrackingConfig(mlflow=False), "a", params, clock=lambda: at_s + 9.0, launch=(launch, at_s))
        tracker.log_metrics(int(at_s), {"loss": 1.0}, at_s + 5.0)
    if status is not None:
        tracker.close(status=status)
    ship(folder)


def test_a_resume_with_other_settings_is_a_nested_run_and_one_without_is_none(tmp_path, run):
    launched(tmp_path, "one", FIRST, 100.0)
    launched(tmp_path, "two", FIRST | {"storage": "/moved"}, 200.0)
    assert run.made == {}
    launched(tmp_path, "three", SECOND, 300.0, "KILLED", drivers=2)
    launched(tmp_path, "four", SECOND, 400.0)
    expected = {"name": "resumed: max_num_steps = 20", "params": {"max_num_steps": "20"}, "began_s": 300.0}
    assert run.made == {"three": expected | {"status": "KILLED", "at_s": 309.0}}


def test_a_launch_whose_end_was_never_told_has_ended_with_its_last_metrics(tmp_path, run):
    launched(tmp_path, "one", FIRST, 100.0)
    launched(tmp_path, "two", SECOND, 200.0, status=None)
    assert "status" not in run.made["two"]
    launched(tmp_path, "three", SECOND, 300.0)
    assert (run.made["two"]["status"], run.made["two"]["at_s"]) == ("FAILED", 205.0)
    assert list(run.made) == ["two"]


def test_lines_that_are_sent_again_make_the_same_nested_runs(tmp_path, run):
    launched(tmp_path, "one", FIRST, 100.0)
    launched(tmp_path, "two", SECOND, 200.0)
    before = json.dumps(run.made)
    (tmp_path / "tracking" / "shipped.json").unlink()
    ship(tmp_path)
    assert json.dumps(run.made) == before


def test_a_setting_that_is_gone_has_changed():
    assert mlflow_shipper.changes({"a": "1", "b": "2"}, {"a": "1"}) == {"b": "(not set)"}


def test_the_model_is_registered_after_all_else(tmp_path, run):
    tracker = Tracker(str(tmp_path), TrackingConfig(mlflow=False), "a")
    tracker.register_model("tiny", str(saved(tmp_path, 10)), 10, lambda: 0.0)
    tracker.log_metrics(10, {"loss": 1.0})
    tracker.close()
    ship(tmp_path)
    model = {"model": "tiny", "source": "checkpoints/10", "step": 10}
    assert [set(record) & {"status", "model"} for record in run.sent] == [{"status"}, {"status"}, {"model"}]
    assert run.sent[-1].items() >= model.items()
    assert tracker.registered() == "models:/tiny/1"


# ---------------------------------------------------------------------- a version of a model


class FakeClient:
    def __init__(self):
        self.names, self.versions, self.uploaded = set(), [], []

    def create_registered_model(self, name):
        if name in self.names:
            raise sys.modules["mlflow.exceptions"].MlflowException("RESOURCE_ALREADY_EXISTS")
        self.names.add(name)

    def search_model_versions(self, text):
        return self.versions

    def log_artifacts(self, run_id, folder, place):
        self.uploaded.append(place)

    def get_run(self, run_id):
        return SimpleNamespace(info=SimpleNamespace(artifact_uri="file:///artifacts"))

    def create_model_version(self, name, source, run_id, tags):
        self.versions.append(SimpleNamespace(source=source, run_id=run_id, tags=tags, version=str(len(self.versions) + 1)))
        return self.versions[-1]


@pytest.fixture
def client(monkeypatch):
    class MlflowException(Exception):
        @property
        def error_code(self):
            return str(self)

    exceptions = ModuleType("mlflow.exceptions")
    exceptions.MlflowException = MlflowException
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    monkeypatch.setitem(sys.modules, "mlflow.exceptions", exceptions)
    return FakeClient()


@pytest.fixture
def exporting(monkeypatch):
    """The exports, and what the next one says of a mistake."""
    asked, mistakes = [], []

    def export(command, **options):
        asked.append(command)
        return SimpleNamespace(returncode=2 if mistakes else 0, stderr=mistakes.pop() if mistakes else "")

    monkeypatch.setattr(subprocess, "run", export)
    return SimpleNamespace(asked=asked, mistakes=mistakes)


def test_a_checkpoint_of_a_run_is_one_version_however_often_it_is_sent(client, exporting, tmp_path):
    steps = (10, 10, 20)
    made = [register(client, "run", "tiny", step, str(tmp_path), str(tmp_path / "tracking")) for step in steps]
    assert made == ["models:/tiny/1", "models:/tiny/1", "models:/tiny/2"]
    assert client.uploaded == ["models/10", "models/20"]
    assert [version.source for version in client.versions] == ["file:///artifacts/models/10", "file:///artifacts/models/20"]
    assert register(client, "another", "tiny", 20, str(tmp_path), str(tmp_path / "tracking")) == "models:/tiny/3"
    assert [command[-1] for command in exporting.asked] == ["mlflow"] * 3


def test_why_a_model_is_not_registered_is_told_and_it_is_tried_again(client, exporting, tmp_path):
    exporting.mistakes.append("reading RUN\nerror: no room\n")
    with pytest.raises(RegistrationError, match=r"^the model of step 10 is not registered as tiny: no room$"):
        register(client, "run", "tiny", 10, str(tmp_path), str(tmp_path / "tracking"))
    assert register(client, "run", "tiny", 10, str(tmp_path), str(tmp_path / "tracking")) == "models:/tiny/1"
    with pytest.raises(FileNotFoundError, match=r"^the model of step 30 is not registered as tiny: its checkpoint .* is gone$"):
        register(client, "run", "tiny", 30, str(tmp_path / "gone"), str(tmp_path / "tracking"))
    assert issubclass(RegistrationError, Exception)
    assert registration.STEP_TAG in client.versions[0].tags


def test_the_model_of_a_run_in_a_bucket_is_exported_from_there(client, exporting, tmp_path, stores, monkeypatch):
    stores["gs"].set(monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    run_dir = stores["gs"].url()
    checkpoint = f"{run_dir}/checkpoints/10-1_0_00000000"
    tracker = Tracker(run_dir, TrackingConfig(mlflow=False), "a")
    tracker.register_model("tiny", checkpoint, 10, lambda: 0.0)
    tracker.close()
    folder = tmp_path / ".gangway" / "runs" / tracker.identity / "tracking"
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["source"] == checkpoint
    with pytest.raises(FileNotFoundError, match=f"its checkpoint {checkpoint} is gone"):
        register(client, "run", "tiny", 10, checkpoint, str(folder))
    (place_of(checkpoint) / "meta.json").put(b"{}")
    assert register(client, "run", "tiny", 10, checkpoint, str(folder)) == "models:/tiny/1"
    assert exporting.asked[0][-4:] == [checkpoint, str(folder / "model"), "--format", "mlflow"]
    stores["gs"].proxy.faults[:] = [Fault(".", "403")]
    with pytest.raises(StorageProblem):  # and so not set aside for good
        register(client, "run", "tiny", 20, f"{run_dir}/checkpoints/20-1_0_00000000", str(folder))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tracking": {"register_model": "a/b"}}, "register_model = 'a/b': expected a name of at most 250 characters"),
        ({"tracking": {"register_model": "a", "mlflow": False}}, "mlflow = false keeps no model"),
        ({"tracking": {"register_model": "a"}, "checkpoint": {"save_at_end": False}}, "save_at_end = false keeps no model"),
    ],
)
def test_a_model_that_could_not_be_registered_is_refused_before_the_run(tmp_path, changes, told):
    with pytest.raises(job.ConfigError) as error:
        job.build({"name": "a", "max_num_steps": 1, "storage": str(tmp_path), **changes})
    assert told in str(error.value)
    assert "tracking" in str(error.value)


def test_a_run_that_is_reached_through_a_link_has_the_store_beside_itself(tmp_path):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "linked").symlink_to(tmp_path / "runs" / "a")
    assert own_store(str(tmp_path / "elsewhere" / "linked")) == own_store(str(tmp_path / "runs" / "a"))

"""The parts of tracking that need neither MLflow nor a process; the rest is in tests/faults/test_tracking.py."""

import json
import os
import threading
from types import SimpleNamespace

import pytest

from orchestrator.tracking import mlflow_shipper
from orchestrator.tracking import tracker as tracking
from orchestrator.tracking.config import TrackingConfig
from orchestrator.tracking.mlflow_shipper import ABOUT, Line, MlflowRun, Shipper, Value, fresh_values, next_batch, read_lines
from orchestrator.tracking.spool import Spool
from orchestrator.tracking.tracker import Tracker, flatten, left_over


def metrics(step, names=("loss",), t=0.0):
    return Line({"t": t, "step": step, "metrics": {name: float(step) for name in names}}, step + 1)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


OTHER = Line({"t": 0.0, "status": "RUNNING"}, 0)
MANY = [str(n) for n in range(400)]


@pytest.mark.parametrize(
    ("lines", "length"),
    [
        ([], 0),
        ([metrics(0)] * 5, 5),
        ([metrics(0), OTHER, metrics(1)], 1),
        ([OTHER, OTHER], 1),
        ([Line(None, 3), metrics(1)], 1),
        ([metrics(0, MANY)] * 5, 2),
        ([metrics(0, MANY * 3)] * 2, 2),  # Names repeat: 400 values each.
        ([metrics(0, [str(n) for n in range(2000)]), metrics(1)], 1),
    ],
)
def test_next_batch_is_lines_of_metrics_or_one_other(lines, length):
    assert len(next_batch(lines)) == length


def test_fresh_values_leave_out_what_was_sent_and_what_is_replayed():
    batch = [metrics(3, t=1.5), metrics(4, ("loss", "eval")), metrics(2), metrics(3), metrics(4), metrics(5)]
    last_step = {"loss": 3}
    assert [(v.name, v.step) for v in fresh_values(batch, last_step)] == [("loss", 4), ("eval", 4), ("loss", 5)]
    assert last_step == {"loss": 3}  # It is noted only when it was sent.
    assert fresh_values(batch[:1], {})[0] == Value("loss", 3.0, 1500, 3)


def test_read_lines_stops_before_a_line_that_is_being_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"t": 1}\nnot json\n[1]\n{"t": 2, "metrics": {"a": 1}}\n{"t": 2, "metrics": 3}\n{"t": 2}\n{"t"')
    lines = read_lines(str(path), 0)
    assert [line.record for line in lines] == [{"t": 1}, None, None, None, None, {"t": 2}]
    assert [line.problem.partition(": ")[2] for line in lines[3:5]] == ["step is missing", "metrics = 3: expected an object"]
    assert read_lines(str(path), lines[0].end, max_lines=1)[0].end == lines[1].end
    assert read_lines(str(path), lines[-1].end) == []


def test_spool_keeps_what_a_full_disk_refuses(tmp_path):
    spool = Spool("/dev/full")
    spool.append({"step": 1})
    spool.append({"step": 2})
    assert spool.problem == "metrics cannot be written: No space left on device; 24 bytes wait in memory"
    spool._file = open(tmp_path / "metrics.jsonl", "ab", buffering=0)  # noqa: SIM115
    spool.append({"step": 3})
    assert spool.problem is None
    spool.close()
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [1, 2, 3]


SECRETIVE = "postgresql://me:pass@db/mlflow"


def test_a_password_is_in_the_shippers_environment_and_in_no_file(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(tracking, "ShipperProcess", lambda run_dir, uri: started.append(uri))
    for password in ("pass", "newer"):
        Tracker(str(tmp_path / "run"), TrackingConfig(uri=SECRETIVE.replace("pass", password)), "run")
        (tmp_path / "run" / "tracking" / "shipped.json").write_text("{}")
    assert started == [SECRETIVE, SECRETIVE.replace("pass", "newer")]
    named = json.loads((tmp_path / "run" / "tracking" / "mlflow.json").read_text())
    assert named["uri"] == "postgresql://***@db/mlflow"
    assert (tmp_path / "run" / "tracking" / "shipped.json").exists(), "another password, but the same run"


def test_another_experiment_is_another_run_to_which_all_is_shipped_again(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "ShipperProcess", lambda run_dir, uri: None)
    folder = tmp_path / "run" / "tracking"
    sent = []
    for experiment in ("first", "first", "second"):
        Tracker(str(tmp_path / "run"), TrackingConfig(experiment=experiment), "run")
        run = FakeRun("")
        run.run_id = json.loads((folder / "mlflow.json").read_text())["experiment"]
        monkeypatch.setattr(mlflow_shipper, "MlflowRun", lambda folder, run=run: run)
        (folder / "metrics.jsonl").write_text('{"t": 0, "step": 4, "metrics": {"loss": 1.0}}\n')
        drain = threading.Event()
        drain.set()
        assert Shipper(str(folder), drain).ship() == 0
        sent.append([value.step for value in run.sent])
    assert sent == [[4], [], [4]]


def test_what_ships_later_is_given_the_password_anew(monkeypatch):
    stored = "postgresql://***@db/mlflow"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", SECRETIVE)
    assert mlflow_shipper.real_uri(stored) == SECRETIVE
    assert mlflow_shipper.real_uri("http://elsewhere:5000") == "http://elsewhere:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:pass@another/mlflow")
    with pytest.raises(
        LookupError, match=r"of postgresql://\*\*\*@db/mlflow are not stored; set MLFLOW_TRACKING_URI to the whole"
    ):
        mlflow_shipper.real_uri(stored)


def test_without_mlflow_there_is_the_file_and_no_process(tmp_path):
    times = iter(range(100, 200))
    tracker = Tracker(str(tmp_path), TrackingConfig(mlflow=False), "a", {"seed": 0}, clock=lambda: next(times))
    tracker.log_metrics(1, {"loss": 2.0}, at_s=50.0)
    tracker.log_metrics(2, {"note": "no number"})
    assert tracker.where() == {"uri": None, "run_id": None, "command": None}
    assert tracker.close() is None
    assert tracker.close() is None
    assert read(tmp_path / "tracking" / "metrics.jsonl") == [
        {"t": 100, "status": "RUNNING"},
        {"t": 101, "params": {"seed": "0"}},
        {"t": 50.0, "step": 1, "metrics": {"loss": 2.0}},
        {"t": 102, "status": "FINISHED"},
    ]
    assert not [thread for thread in threading.enumerate() if thread.name == "shipper"]


def test_flatten():
    assert flatten({"a": {"b": {"c": 1}, "d": None}, "e": {}, "f": (1, 2)}) == {
        "a.b.c": "1",
        "a.d": "None",
        "e": "{}",
        "f": "(1, 2)",
    }


def test_left_over_counts_whole_lines(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n{}\n")
    assert left_over(str(tmp_path)).startswith(
        "2 tracking entries are not in MLflow yet (there was no time to); they are kept in"
    )
    (tmp_path / "shipped.json").write_text(json.dumps({"offset": 6}))
    assert left_over(str(tmp_path)) is None


def test_config():
    assert TrackingConfig().resolved_uri("/data/runs/a") == "sqlite:////data/runs/mlflow.db"
    assert TrackingConfig(uri="http://host:5000").resolved_uri("/data/runs/a") == "http://host:5000"
    assert TrackingConfig(uri="sqlite:///my.db").resolved_uri("/data/runs/a") == f"sqlite:///{os.getcwd()}/my.db"
    with pytest.raises(ValueError, match=r"uri = 'mlruns': expected a URL such as http://host:5000 or sqlite:"):
        TrackingConfig(uri="mlruns")
    with pytest.raises(ValueError, match="experiment = ' ': expected a name"):
        TrackingConfig(experiment=" ")


class FakeError(Exception):
    def __init__(self, error_code):
        super().__init__(error_code)
        self.error_code = error_code


class FakeRun:
    """Refuses batches with a `bad` value in them, or everything, with an error code."""

    found = True
    run_id = "a run"

    def __init__(self, error_code, up=True):
        self.error_code, self.up = error_code, up
        self.sent = []

    def send_values(self, values):
        if any(v.name == "bad" for v in values):
            raise FakeError(self.error_code)
        self.sent += values

    def send_record(self, record):
        self.send_values([Value("bad", 0.0, 0, 0)])

    def answers(self):
        return self.up


@pytest.fixture
def ship(tmp_path, monkeypatch):
    """Ships two good lines around a bad one, draining; returns (status, steps sent, state)."""

    def run_it(fake, attempts_at_end=1):
        monkeypatch.setattr(mlflow_shipper, "MlflowRun", lambda folder: fake)
        monkeypatch.setattr(mlflow_shipper, "POLL_S", 0.0)
        monkeypatch.setattr(mlflow_shipper, "ATTEMPTS_AT_END", attempts_at_end)
        lines = [{"t": 0.0, "step": n, "metrics": {"bad" if n == 1 else "loss": 1.0}} for n in range(3)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"t": 0, "tags": {}}]))
        drain = threading.Event()
        drain.set()
        status = Shipper(str(tmp_path), drain).ship()
        return status, [v.step for v in fake.sent], json.loads((tmp_path / "shipped.json").read_text())

    return run_it


def test_a_refused_value_is_found_among_the_good_ones(ship, tmp_path):
    status, sent, state = ship(FakeRun("INVALID_PARAMETER_VALUE"))
    assert (status, sent, state["rejected"], state["problem"]) == (0, [0, 2], 2, None)
    rejected = read(tmp_path / "rejected.jsonl")
    assert rejected[0] == {"rejected": {"name": "bad", "value": 1.0, "time_ms": 0, "step": 1}, "why": "INVALID_PARAMETER_VALUE"}
    assert rejected[1]["rejected"] == {"t": 0, "tags": {}}


def test_a_server_that_is_down_refuses_nothing(ship):
    status, sent, state = ship(FakeRun("INVALID_PARAMETER_VALUE", up=False))
    assert (status, sent, state["rejected"], state["offset"]) == (3, [], 0, 0)
    assert state["problem"] == "MLflow does not take metrics now: INVALID_PARAMETER_VALUE"
    assert ship(FakeRun("TEMPORARILY_UNAVAILABLE"), attempts_at_end=20)[2]["rejected"] == 0


def test_an_internal_error_over_the_same_entries_becomes_a_refusal_in_the_end(ship):
    assert ship(FakeRun("INTERNAL_ERROR"), attempts_at_end=3)[2]["rejected"] == 0
    status, sent, state = ship(FakeRun("INTERNAL_ERROR"), attempts_at_end=20)
    assert (status, state["rejected"], sent) == (0, 2, [0, 2])


def test_an_experiment_that_was_deleted_is_reported_with_the_way_out():
    deleted = SimpleNamespace(experiment_id="7", lifecycle_stage="deleted")
    run = SimpleNamespace(client=SimpleNamespace(get_experiment_by_name=lambda name: deleted))
    with pytest.raises(LookupError) as error:
        MlflowRun._find_experiment(run, "gangway", None)
    assert str(error.value) == (
        "the experiment 'gangway' was deleted: restore it (mlflow experiments restore --experiment-id 7), and the metrics are "
        "shipped; or set tracking.experiment to another name"
    )


def test_an_experiment_of_somebody_becomes_one_of_trainings_unless_it_has_a_kind():
    experiment, told = SimpleNamespace(experiment_id="7", lifecycle_stage="active", tags={}), []
    client = SimpleNamespace(get_experiment_by_name=lambda name: experiment, set_experiment_tag=lambda *tag: told.append(tag))
    for _ in range(2):
        assert MlflowRun._find_experiment(SimpleNamespace(client=client), "gangway", None) == "7"
        experiment.tags["mlflow.experimentKind"] = "genai_development"
    assert told == [("7", "mlflow.experimentKind", "custom_model_development")]


@pytest.mark.parametrize("note", [None, ABOUT, "words of a person", ""])
def test_the_description_links_the_report_and_stays_what_a_person_has_written(note):
    tags = {} if note is None else {"mlflow.note.content": note}
    client = SimpleNamespace(
        get_run=lambda run_id: SimpleNamespace(data=SimpleNamespace(tags=tags)),
        set_tag=lambda run_id, name, value: tags.update({name: value}),
    )
    run = SimpleNamespace(client=client, run_id="r", _experiment_id="7")
    for page in ("report/figures", "report/report.html", "report/report.html"):
        MlflowRun.describe(run, page)
    link = f"{ABOUT}\n\n[Report](#/experiments/7/runs/r/artifactPath/report/report.html)"
    assert tags == {"mlflow.note.content": link if note in (None, ABOUT) else note}

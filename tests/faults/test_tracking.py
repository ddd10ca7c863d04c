"""The MLflow shipper with real stores: killed, with its server down, refused, and out of time."""

import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from urllib.parse import quote

import pytest

from gangway.storage import documents
from gangway.storage.opening import place_of
from orchestrator.run_state.lease import holder_of
from orchestrator.tracking.config import TrackingConfig
from orchestrator.tracking.tracker import Tracker
from tests import ROOT
from tests.programs.processes import PATIENCE_S
from tests.stores.contract import buckets

WINGS = ("orchestrator/tracking", "trainers/pyfunc.py", "trainers/recorders")


@pytest.fixture
def run_dir(tmp_path):
    return str(tmp_path / "runs" / "a")


@pytest.fixture(scope="module")
def made_store(tmp_path_factory):
    """A store with its tables made, which takes seconds: tests that are not about making it take a copy."""
    run_dir = tmp_path_factory.mktemp("made") / "runs" / "first"
    assert Tracker(str(run_dir), TrackingConfig(experiment="other"), "first").close(PATIENCE_S) is None
    return (run_dir.parent / "mlflow.db").read_bytes()


@pytest.fixture
def store(run_dir, made_store):
    path = Path(run_dir).parent / "mlflow.db"
    path.parent.mkdir(parents=True)
    path.write_bytes(made_store)
    return path


@contextlib.contextmanager
def tracker(run_dir, close_s=PATIENCE_S, **config):
    it = Tracker(run_dir, TrackingConfig(**config), "a", {"model": {"width": 3}})
    try:
        yield it
    finally:
        it.close(close_s)


def query(store, text):
    with contextlib.closing(sqlite3.connect(f"file:{quote(str(store))}?mode=ro", uri=True)) as database:
        return database.execute(text).fetchall()


def shipped(store, metric="loss", run_name="a"):
    """(step, value) pairs of a metric, as often as they are in the store."""
    return query(
        store,
        "select m.step, m.value from metrics m join runs r on r.run_uuid = m.run_uuid "
        f"where m.key = '{metric}' and r.name = '{run_name}' order by m.step",
    )


def wait_for(condition, what, patience_s=PATIENCE_S):
    deadline_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {patience_s} s for: {what}"
        time.sleep(0.2)


def shipper_pid(it):
    wait_for(lambda: it._shipper._process, "a shipper")
    return it._shipper._process.pid


def log_steps(it, steps):
    for step in steps:
        it.log_metrics(step, {"loss": float(step)})


def expected(steps):
    return [(step, float(step)) for step in steps]


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow("ships to a store of MLflow")
def test_everything_reaches_mlflow_and_the_driver_never_imports_it(run_dir, store, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)  # an import of it fails here; the shipper is another process
    (tmp_path / "page.html").write_text("hi")
    with tracker(run_dir) as it:
        log_steps(it, range(2000))
        it.log_metrics(5, {"eval_loss": float("nan"), "note": "no number"})
        it.log_metrics(6, {"host_cpu_percent": 12.5, "process_memory_bytes": 3.0})
        it.set_tags({"digest": 12})
        it.log_artifact(tmp_path / "page.html", "report")
        assert it.close(PATIENCE_S) is None
        assert it.problem() == "metrics left out, since they are not numbers: note"
        assert it.where()["command"] == f"mlflow ui --backend-store-uri sqlite:///{store}"
        assert it.where()["run_id"] == query(store, "select run_uuid from runs where name = 'a'")[0][0]
    assert shipped(store) == expected(range(2000))
    # Away from the loss, on MLflow's page for the system.
    assert shipped(store, "system/host_cpu_percent") == [(6, 12.5)]
    assert shipped(store, "system/process_memory_bytes") == [(6, 3.0)]
    assert query(store, "select is_nan from metrics where key = 'eval_loss'") == [(1,)]
    assert query(store, "select key, value from params") == [("model.width", "3")]
    assert ("digest", "12") in query(store, "select key, value from tags")
    notes = query(store, "select value from tags where key = 'mlflow.note.content' order by length(value)")
    assert notes[-1][0].endswith(f"/runs/{it.where()['run_id']}/artifactPath/report/page.html)")
    assert query(store, "select status from runs where name = 'a'") == [("FINISHED",)]
    assert [path.read_text() for path in store.parent.glob("mlartifacts/*/artifacts/report/page.html")] == ["hi"]


@pytest.mark.slow("ships to a store of MLflow")
def test_one_mlflow_run_over_restarts_and_replayed_steps_are_there_once(run_dir, store):
    with tracker(run_dir) as it:
        log_steps(it, range(10))
        it.close(PATIENCE_S, status="FAILED")
    assert query(store, "select status from runs where name = 'a'") == [("FAILED",)]
    with tracker(run_dir) as it:
        log_steps(it, range(5, 15))
        it.set_params({"model": {"width": 4}, "more": 1})
    assert shipped(store) == expected(range(15))
    assert query(store, "select status from runs where name = 'a'") == [("FINISHED",)]
    assert sorted(query(store, "select key, value from params")) == [("model.width", "3"), ("more", "1")]
    assert ("changed.model.width", "4") in query(store, "select key, value from tags")


@pytest.mark.slow("ships to a store of MLflow")
def test_a_killed_shipper_is_started_again_and_nothing_is_lost_or_doubled(run_dir, store):
    with tracker(run_dir) as it:
        for round_number in range(3):
            log_steps(it, range(round_number * 50, round_number * 50 + 50))
            if round_number == 1:
                wait_for(lambda: len(shipped(store)) == 100, "the first two rounds in the store")
            pid = shipper_pid(it)
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: shipper_pid(it) != pid, "another shipper")
    assert shipped(store) == expected(range(150))


@pytest.mark.slow("ships to a store of MLflow")
def test_lines_shipped_twice_are_in_the_store_once(run_dir, store):
    """As when the shipper dies between sending a batch and noting it."""
    with tracker(run_dir) as it:
        log_steps(it, range(50))
    documents.delete(documents.join(run_dir, "tracking", "shipped.json"))
    with tracker(run_dir) as it:
        log_steps(it, range(50, 60))
    assert shipped(store) == expected(range(60))
    assert query(store, "select count(*) from runs where name = 'a'") == [(1,)]


@pytest.mark.slow("starts MLflow")
def test_the_shipper_does_not_outlive_a_killed_driver(run_dir, store):
    program = (
        "import sys, time; from orchestrator.tracking.tracker import *\n"
        f"it = Tracker({run_dir!r}, TrackingConfig(), 'a'); it.log_metrics(1, {{'loss': 1.0}})\n"
        "while it._shipper._process is None: time.sleep(0.01)\n"
        "print(it._shipper._process.pid, flush=True); time.sleep(1000)"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pid = int(driver.stdout.readline())
    driver.kill()
    driver.wait()
    driver.stdout.close()
    wait_for(lambda: gone(pid), "the end of the shipper")
    # What the dead driver had said is shipped by hand.
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.tracking", run_dir], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout == "all shipped\n"
    assert shipped(store) == expected([1])


@pytest.mark.slow("ships to a store of MLflow")
def test_two_runs_that_start_at_once_on_a_new_store(tmp_path):
    run_dirs = [str(tmp_path / "runs" / name) for name in "ab"]
    trackers = [Tracker(run_dir, TrackingConfig(), os.path.basename(run_dir)) for run_dir in run_dirs]
    for it in trackers:
        log_steps(it, range(20))
    assert [it.close(PATIENCE_S) for it in trackers] == [None, None]
    store = tmp_path / "runs" / "mlflow.db"
    assert [shipped(store, run_name=name) for name in "ab"] == [expected(range(20))] * 2
    assert query(store, "select count(*) from experiments where name = 'gangway'") == [(1,)]
    assert query(store, "select key, value from experiment_tags") == [("mlflow.experimentKind", "custom_model_development")]
    assert not list(store.parent.glob("*.unfinished*"))


@pytest.mark.slow("ships to a store of MLflow")
def test_a_shipper_killed_while_it_makes_the_store_leaves_no_broken_one(run_dir):
    store = Path(run_dir).parent / "mlflow.db"
    with tracker(run_dir) as it:
        log_steps(it, range(5))
        wait_for(lambda: (store.parent / "mlflow.db.unfinished").exists() or store.exists(), "a database in the making")
        os.kill(shipper_pid(it), signal.SIGKILL)
    assert shipped(store) == expected(range(5))


def test_what_mlflow_refuses_is_set_aside_and_the_rest_is_shipped(run_dir, store):
    with tracker(run_dir) as it:
        for step in range(40):
            it.log_metrics(step, {"loss": float(step), "bad|name": 1.0} if step == 17 else {"loss": float(step)})
        it.log_artifact("/no/such/file")
        it.log_metrics(40, {"loss": 40.0})
        assert it.close(PATIENCE_S) is None
        folder = documents.join(run_dir, "tracking")
        assert it.problem() == f"2 entries that MLflow refuses are set aside in {folder}/rejected.jsonl"
    assert shipped(store) == expected(range(41))
    rejected = Path(folder, "rejected.jsonl").read_text().splitlines()
    assert len(rejected) == 2
    assert "bad|name" in rejected[0]
    assert "artifact /no/such/file is gone: it has to stay until it is shipped" in rejected[1]


@pytest.mark.slow("ships to a store of MLflow")
def test_a_line_that_a_dying_driver_left_unfinished_harms_no_other(run_dir, store):
    with tracker(run_dir) as it:
        log_steps(it, range(3))
    with open(documents.join(run_dir, "tracking", "metrics.jsonl"), "a") as file:
        file.write('{"t": 12.0, "step": 3, "metr')
    with tracker(run_dir) as it:
        log_steps(it, range(3, 6))
    assert shipped(store) == expected(range(6))


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.slow("ships to a store of MLflow")
def test_a_server_that_refuses_connections_stalls_nothing_and_the_next_start_ships_all(run_dir, store):
    with tracker(run_dir, close_s=1.0, uri=f"http://127.0.0.1:{free_port()}") as it:
        log_steps(it, range(5000))
        wait_for(it.problem, "the problem to be noticed")
        assert it.problem().startswith("MLflow does not take metrics now: ")
        message = it.close(PATIENCE_S)
        assert gone(shipper_pid(it))
    assert message.startswith("5003 tracking entries are not in MLflow yet (MLflow does not take metrics now: ")
    assert message.endswith(f"shipped at the next start, or by: python -m orchestrator.tracking {run_dir}")
    with tracker(run_dir) as it:  # The store is another one now: it gets everything from the beginning.
        log_steps(it, range(5000, 5010))
    assert shipped(store) == expected(range(5010))


def test_close_keeps_to_its_time_with_a_server_that_never_answers(run_dir):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        it = Tracker(run_dir, TrackingConfig(uri=f"http://127.0.0.1:{listener.getsockname()[1]}"), "a")
        log_steps(it, range(10))
        listener.accept()[0].close()
        asked = threading.Event()
        it.register_model("tiny", f"{run_dir}/checkpoints/2", 2, lambda: 0.0 if asked.is_set() else 3600.0)
        closing = threading.Thread(target=it.close, args=(1.0,), daemon=True)
        closing.start()
        time.sleep(2.0)
        assert closing.is_alive()  # for the model, until a stop is asked for
        asked.set()
        closing.join(PATIENCE_S)  # Left to itself the shipper would go on for ever.
        assert not closing.is_alive()
        assert gone(shipper_pid(it))
    assert it.close(1.0).startswith("13 tracking entries are not in MLflow yet")


@pytest.mark.slow("ships to a store of MLflow")
def test_a_server_that_comes_back_gets_what_it_missed(run_dir, store):
    """A real server: down at first, then up, then the run goes on."""
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    with tracker(run_dir, uri=uri) as it:
        log_steps(it, range(10))
        wait_for(it.problem, "the problem to be noticed")
        with mlflow_server(store, port):
            wait_for(lambda: len(shipped(store)) == 10, "what was logged while the server was down")
            log_steps(it, range(10, 20))
            assert it.close(PATIENCE_S) is None
            assert it.problem() is None
            assert it.where() == {"uri": uri, "run_id": it.where()["run_id"], "command": None}
    assert shipped(store) == expected(range(20))


@contextlib.contextmanager
def mlflow_server(store, port):
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{store}", "--port", str(port)]
    command += ["--workers", "1", "--artifacts-destination", str(store.parent / "served")]
    with open(store.parent / "server.log", "wb") as log:
        # Its runners of jobs take more of a processor than all the rest.
        env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/health"), "the server")
        yield
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def whole_run(run_dir, tmp_path, *more):
    """A run on one host, of steps of a tenth of a second, each published. Ray Train starts its driver again when that dies."""
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / "pace.json").write_text(json.dumps({"step_s": 0.1}))
    settings = ["driver.supervise=true", "hosts.count=1", "publish_every_steps=1", "max_num_steps=1000000", "previews=null"]
    settings += [f"storage={os.path.dirname(run_dir)}", "name=a", f"hosts.env.GANGWAY_FAULTS={tmp_path}/orders", *more]
    with open(tmp_path / "console.log", "w") as log:
        command = [sys.executable, "-m", "orchestrator.run", "configs/tiny.yaml", *settings]
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, process_group=0)


def step_times(run_dir):
    """The seconds of each step, by the training process that took it."""
    records = [json.loads(line) for line in Path(run_dir, "tracking", "metrics.jsonl").read_text().splitlines()]
    return {one["step"]: one["metrics"]["step_time_s"] for one in records if "step_time_s" in one.get("metrics", ())}


AWAY_S = 20.0


@pytest.mark.slow("a whole job, whose server of MLflow is away for 20 s")
def test_a_server_killed_for_20_s_while_the_driver_restarts_costs_no_point_and_no_step(run_dir, store, tmp_path):
    port = free_port()
    with contextlib.ExitStack() as ends:
        server = ends.enter_context(contextlib.ExitStack())
        server.enter_context(mlflow_server(store, port))
        process = whole_run(run_dir, tmp_path, f"tracking.uri=http://127.0.0.1:{port}", "checkpoint.save_steps=1000000")
        ends.callback(process.kill)
        wait_for(lambda: len(shipped(store)) >= 100, "100 steps in the store", PATIENCE_S)
        before = shipped(store)[-1][0]
        driver = holder_of(run_dir).pid
        assert driver != process.pid
        server.close()
        killed_s = time.monotonic()
        wait_for(lambda: max(step_times(run_dir)) >= before + 20, "steps without the server")
        os.kill(driver, signal.SIGKILL)
        wait_for(lambda: holder_of(run_dir).pid != driver, "the driver to be started again", PATIENCE_S)
        time.sleep(max(0.0, killed_s + AWAY_S - time.monotonic()))
        back = max(step_times(run_dir))
        assert shipped(store)[-1][0] < before + 20
        server.enter_context(mlflow_server(store, port))
        wait_for(lambda: shipped(store)[-1][0] >= back, "what was logged while the server was away", PATIENCE_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 3, (tmp_path / "console.log").read_text()
        # The end waits 10 s for MLflow, and names this command if that was not enough. It was not, once, at a high load.
        command = [sys.executable, "-m", "orchestrator.tracking", run_dir]
        subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
    summary = documents.read_json(documents.join(run_dir, "summary.json"))
    assert [incident["kind"] for incident in summary["incidents"]] == ["driver_lost"]
    assert [step for step, _ in shipped(store)] == list(range(1, summary["steps"] + 1))
    took_s = step_times(run_dir)
    usual, meanwhile = [took_s[step] for step in range(before - 50, before)], [took_s[step] for step in range(before + 1, back)]
    assert statistics.mean(meanwhile) < 1.5 * statistics.mean(usual)


@pytest.mark.slow(
    "three shippers, each of which imports MLflow; tests/unit/orchestrator/tracking/test_mlflow_store.py has the parts"
)
def test_a_storage_with_any_letters_may_be_moved_and_copied(tmp_path):
    """One run in MLflow before and after the move, and its artifacts with it; another one in the copy."""

    def go_on(storage, step):
        run = storage / "run"
        with tracker(str(run)) as it:
            it.log_metrics(step, {"loss": float(step)})
            (run / f"{step}.json").write_text("{}")
            it.log_artifact(run / f"{step}.json")
        assert it.close() is None
        return it.where()

    storage, moved, copied = tmp_path / "100% a?b#c %41", tmp_path / "mo?ved", tmp_path / "copied"
    (storage / "run").mkdir(parents=True)
    first = go_on(storage, 1)
    assert [path.name for path in tmp_path.iterdir()] == [storage.name], "nothing is written beside the storage"
    assert first["command"].startswith(f"cd '{storage}' && mlflow ui")
    storage.rename(moved)
    assert go_on(moved, 2)["run_id"] == first["run_id"]
    assert shipped(moved / "mlflow.db") == [(1, 1.0), (2, 2.0)]
    artifacts = moved / "mlartifacts" / first["run_id"] / "artifacts"
    assert sorted(path.name for path in artifacts.iterdir()) == ["1.json", "2.json"]
    shutil.copytree(moved, copied)
    assert go_on(copied, 3)["run_id"] != first["run_id"]
    assert shipped(moved / "mlflow.db") == [(1, 1.0), (2, 2.0)]
    assert [path.name for path in moved.rglob("3.json")] == []


MODEL = {"width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 24}
PREDICT = """
import sys, mlflow
mlflow.set_tracking_uri(sys.argv[1])
found = mlflow.pyfunc.load_model("models:/tiny/1").predict(["ab", "a"], params={"max_new_tokens": 4})
assert len(found) == 2 and all(isinstance(text, str) for text in found), found
print("predicted")
"""


@pytest.mark.slow("trains, registers a model in MLflow and loads it there")
def test_the_final_model_is_registered_once_loads_and_predicts_and_a_changed_resume_is_a_nested_run(run_dir, store, tmp_path):
    train(os.path.dirname(run_dir), tmp_path)
    for launch, steps in (("one", 2), ("two", 2), ("three", 4)):
        it = Tracker(run_dir, TrackingConfig(), "a", {"max_num_steps": steps}, launch=(launch, time.time()))
        it.register_model("tiny", documents.join(run_dir, "checkpoints", "2"), 2, lambda: PATIENCE_S)
        assert it.close(PATIENCE_S) is None
        assert it.registered() == "models:/tiny/1"
    assert query(store, "select count(*) from model_versions") == [(1,)]
    named = query(
        store, "select r.name, r.status from runs r join tags t on t.run_uuid = r.run_uuid where t.key = 'mlflow.parentRunId'"
    )
    assert named == [("resumed: max_num_steps = 4", "FINISHED")]
    assert predicts(store)


@pytest.mark.slow("trains, registers a model in MLflow and loads it there")
def test_the_final_model_of_a_run_in_a_bucket_is_registered_loads_and_predicts(made_store, tmp_path, monkeypatch):
    store = tmp_path / ".gangway" / "runs" / "mlflow.db"
    store.parent.mkdir(parents=True)
    store.write_bytes(made_store)
    monkeypatch.setenv("HOME", str(tmp_path))
    with buckets() as found:
        found["s3"].set(monkeypatch)
        storage = found["s3"].url()
        train(storage, tmp_path)
        (checkpoint,) = place_of(f"{storage}/a/checkpoints").folders()
        it = Tracker(f"{storage}/a", TrackingConfig(), "a")
        it.register_model("tiny", f"{storage}/a/checkpoints/{checkpoint}", 2, lambda: PATIENCE_S)
        assert it.close(PATIENCE_S) is None
    assert it.registered() == "models:/tiny/1"
    assert predicts(store)


def train(storage, tmp_path):
    """Trains the run `a` to step 2."""
    (tmp_path / "text.txt").write_text("ab" * 4000)
    settings = {
        "max_num_steps": 2,
        "global_batch_size": 8,
        "storage": storage,
        "name": "a",
        "model": MODEL,
        "data": {"paths": [str(tmp_path / "text.txt")], "sequence_length": 8},
        "evaluation": {"max_batches": 1},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "trainers.run", str(tmp_path / "config.yaml")]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def predicts(store):
    """Whether MLflow loads the first version of `tiny`, and it predicts, in a process that has only MLflow's store."""
    command = [sys.executable, "-c", PREDICT, f"sqlite:///{store}"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout.endswith("predicted\n")

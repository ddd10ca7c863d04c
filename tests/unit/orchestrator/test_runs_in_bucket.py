"""The commands that read a run's files, of runs in a bucket: they say what they say of a folder, and cost few requests."""

import json
import os
import time

import pytest

from gangway.errors import CheckpointUnavailableError
from gangway.program import EXIT_REFUSED
from gangway.storage import documents, json_text
from gangway.storage.opening import place_of
from gangway.storage.row import Kept, Row
from orchestrator.commands import checkpoints, profile
from orchestrator.report import __main__ as report
from orchestrator.run_state import launch as launches
from orchestrator.run_state import outcome, requests
from orchestrator.run_state.incidents import Incident
from orchestrator.runs import compare, history, incidents, logs, overview, save, status
from orchestrator.tracking.config import TrackingConfig
from tests.stores.fault_proxy import Fault
from trainers.checkpoint import layout

METRICS = {"loss": 2.5, "learning_rate": 1e-3, "tokens_per_s": 4000.0, "step_time_s": 0.5}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    layout._rows.clear()
    yield
    assert not [name for name in os.listdir(tmp_path) if ":" in name], "a URL was taken for a path"


@pytest.fixture
def bucket(stores, monkeypatch):
    stores["gs"].set(monkeypatch)
    return stores["gs"]


@pytest.fixture
def storage(bucket):
    return bucket.url()


@pytest.fixture
def start(storage):
    opened = []

    def start(name, **settings):
        run_dir, began_s = f"{storage}/{name}", time.time() - 100.0
        launch = launches.open_launch(run_dir, "launch", began_s, TrackingConfig(mlflow=False), settings, time.time)
        opened.append(launch)
        launch.progress.max_steps, launch.progress.step = 100, 40
        launch.progress.goodput.switch("step", began_s + 20.0)
        assert launch.progress.is_new(40, "train")
        launch.publish(40, METRICS)
        launch.publish(40, {"eval_loss": 3.0})
        launch.record(Incident(kind="process_crash", host=1, generation=0, step=9, failed_at_s=began_s))
        launch.saved(30, f"{run_dir}/checkpoints/30-1_0_00000000")
        assert launch.flush(30.0)
        return launch

    yield start
    for launch in opened:
        launch.close("FINISHED", 30.0)


def end(launch):
    launch.close("FINISHED", 30.0)
    outcome.write_outcome(
        launch.run_dir, {"launch_id": "launch", "status": "finished", "stop_reason": "max_steps", "error": None}
    )


def test_the_commands_say_what_a_run_in_a_bucket_does(start, storage, capsys):
    launch = start("a", seed="1")
    run = overview.read(f"{storage}/a")
    assert (run.name, run.kind, run.state, run.step, run.checkpoint_step) == ("a", overview.LIVE, "training", 40, 30)
    assert (run.metrics["loss"], run.evaluation["eval_loss"], run.num_incidents, run.problems) == (2.5, 3.0, 1, ())
    assert status.main([storage, "--json"]) == 0
    assert [one["folder"] for one in json.loads(capsys.readouterr().out)] == [f"{storage}/a"]
    assert incidents.main([f"{storage}/a"]) == 0
    assert "process crash" in capsys.readouterr().out
    end(launch)
    end(start("b", seed="2"))
    assert compare.main([f"{storage}/a", f"{storage}/b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == {"seed": ["1", "2"]}
    assert history.main([f"{storage}/a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"loss": [[40, 2.5]], "eval_loss": [[40, 3.0]]}
    assert report.main([f"{storage}/a"]) == 0
    assert capsys.readouterr().out == f"{storage}/a/report.html\n"
    page = place_of(f"{storage}/a/report.html").get().decode()
    assert "process crash" in page
    assert "2.5" in page


def test_a_look_at_all_runs_costs_three_reads_of_each_that_has_ended(start, storage, bucket):
    end(start("a"))
    kinds = ("launch.json", "outcome.json", "summary.json")
    documents.write_json(f"{storage}/a/summary.json", {"launch_id": "launch", "hosts": 2})
    place = place_of(f"{storage}/a")
    for number in range(19):
        for name in kinds:
            (place.with_name(f"b{number}") / name).put((place / name).get())
    place_of(f"{storage}/no run/notes.txt").put(b"a user's")
    bucket.proxy.counted()
    assert len(status.look(storage)) == 20
    counts = bucket.proxy.counted()
    # Beside them: whether the place is a run, which runs there are, and of the folder that is none that it is none.
    assert counts["GET"] <= 3 * 20 + 12
    assert counts["LIST"] <= 6
    assert counts.get("HEAD", 0) <= 4
    assert counts.get("PUT", 0) + counts.get("DELETE", 0) == 0


def test_the_newest_logs_are_shown_and_followed(storage, capsys):
    logs_of = place_of(f"{storage}/a/logs/host-0003")
    place_of(f"{storage}/a/checkpoints/none").put(b"")
    (logs_of / "process-1.log").put(b"old\n")
    (logs_of / "process-2.log").put(b"one\ntw")
    (logs_of / "process-3.log").put(b"")
    assert logs.main([f"{storage}/a", "--lines", "1"]) == 0
    assert capsys.readouterr().out == f"==> host 3: {logs_of}/process-2.log <==\ntw\n"
    (log,) = logs.newest(f"{storage}/a", None)
    sizes = {log.place.url: 4}
    (logs_of / "process-2.log").put(b"one\ntwo\n")
    (log,) = logs.newest(f"{storage}/a", 3)
    assert list(logs._added(log, sizes)) == ["two"]
    assert logs.main([f"{storage}/a", "--host", "1"]) == EXIT_REFUSED
    assert "no log of host 1; there are those of: 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        status.main,
        checkpoints.main,
        incidents.main,
        logs.main,
        history.main,
        report.main,
        save.main,
        profile.main,
        lambda words: compare.main([*words, *words]),
    ],
)
def test_what_cannot_be_read_is_told_and_the_status_is_not_zero(command, storage, bucket, monkeypatch, capsys):
    assert command([f"{storage}/none"]) == 2
    assert "none" in capsys.readouterr().err
    assert command(["gcs://bucket/run"]) == 2
    assert "write gs://bucket/run" in capsys.readouterr().err
    bucket.proxy.faults[:] = [Fault(".", "403")]
    assert command([f"{storage}/none"]) == 2
    message = capsys.readouterr().err
    assert "access is refused" in message
    assert "GOOGLE_APPLICATION_CREDENTIALS" in message
    assert "Errno" not in message


def test_a_newer_row_and_a_damaged_document_are_told(storage, start, capsys):
    end(start("a"))
    place_of(f"{storage}/a/launch.json").put(b"{")
    assert status.main([f"{storage}/a"]) == 0
    assert "launch.json cannot be read" in capsys.readouterr().out
    newest = place_of(f"{storage}/a/row").list()[-1].name
    document = documents.read_json(f"{storage}/a/row/{newest}")
    text = json_text.seal({**{k: v for k, v in document.items() if k != "digest"}, "format": 99})
    place_of(f"{storage}/a/row/99999999.json").put(text.encode())
    layout._rows.clear()
    assert checkpoints.main([f"{storage}/a"]) == 2
    assert "was written by a newer gangway" in capsys.readouterr().err


def test_a_request_to_a_run_in_a_bucket_reaches_its_driver(start, storage):
    launch = start("a")
    path = requests.send(f"{storage}/a", requests.SAVE, "launch")
    launch.store()
    assert launch.flush(30)
    assert [request.kind for request in launch.new_requests()] == ["save"]
    assert not requests.is_waiting(path)


def test_a_loss_in_a_bucket_is_accepted_by_saying_so(storage, capsys):
    run = place_of(f"{storage}/a")
    row = Row(run / "row")
    term = row.take_over({"hostname": "here"}).term
    for step in (4, 8):
        row.commit(term, step, Kept(f"{step}-1_0_00000000", "digest"))
    (run / "checkpoints" / "4-1_0_00000000" / "meta.json").put(b"{}")
    folder = run / "checkpoints"
    with pytest.raises(CheckpointUnavailableError, match="checkpoint 8 of this run was committed"):
        layout.check(folder, row.newest(), None)
    assert checkpoints.main([run.url, "--accept-loss"]) == checkpoints.EXIT_FINE
    assert "incomplete" in capsys.readouterr().out
    newest = Row(run / "row").newest()
    assert (newest.what, newest.step, sorted(newest.of("checkpoints"))) == ("loss", 4, [4])
    assert newest.term > term, "a driver that slept commits nothing after it"
    layout.check(folder, newest, None)

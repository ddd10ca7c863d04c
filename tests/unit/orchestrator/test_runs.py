"""`gangway status`, `compare`, `incidents`, `logs`, `stop` and `save`, by the files of runs alone."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from gangway import terminal
from gangway.program import EXIT_REFUSED
from gangway.storage import documents, json_text
from gangway.storage.opening import place_of
from gangway.storage.row import Kept
from orchestrator.commands import profile, sweep
from orchestrator.config.locate import NoRunError
from orchestrator.run_state import launch as launches
from orchestrator.run_state import outcome
from orchestrator.run_state.incidents import Incident
from orchestrator.run_state.lease import LEASE_KIND
from orchestrator.runs import asking, compare, incidents, logs, overview, status
from orchestrator.tracking.config import TrackingConfig
from tests.programs.processes import PATIENCE_S, wait_until
from tests.saved import saved
from trainers.checkpoint import layout

METRICS = {"loss": 2.5, "learning_rate": 1e-3, "tokens_per_s": 4000.0, "step_time_s": 0.5, "mine": 3.0}


@pytest.fixture
def storage(tmp_path):
    return tmp_path / "runs"


@pytest.fixture
def start(storage):
    """Opens the launch of a run, which has taken 40 of 100 steps."""
    opened = []

    def start(run, *, loss=2.5, **settings):
        run_dir = storage / run
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        began_s = time.time() - 100.0
        launch = launches.open_launch(str(run_dir), "launch", began_s, TrackingConfig(mlflow=False), settings, time.time)
        opened.append(launch)
        launch.progress.max_steps, launch.progress.step = 100, 40
        launch.progress.goodput.switch("step", began_s + 20.0)
        launch.saved(30, str(saved(run_dir, 30)))
        assert launch.progress.is_new(40, "train")
        launch.publish(40, METRICS | {"loss": loss})
        launch.publish(40, {"eval_loss": 3.0, "eval_seconds": 1.0})
        launch.formed({"generation": 0, "gang": {"members": [0, 1, 2]}})
        assert launch.flush(30.0)
        return launch

    yield start
    for launch in opened:
        launch.close("FINISHED", PATIENCE_S)


def end(launch, how):
    launch.close("FINISHED", PATIENCE_S)
    outcome.write_outcome(launch.run_dir, {"launch_id": "launch", "status": how, "stop_reason": "max_steps", "error": None})


def test_a_run_that_goes_on(start, storage):
    launch = start("a")
    run = overview.read(storage / "a")
    assert (run.kind, run.state, run.problems) == (overview.LIVE, "training", ())
    assert (run.step, run.max_steps, run.checkpoint_step, run.hosts, run.num_incidents) == (40, 100, 30, 3, 0)
    assert run.metrics["mine"] == 3.0
    assert run.evaluation["eval_loss"] == 3.0
    assert run.left_s == 30.0
    assert run.goodput == pytest.approx(0.8, abs=0.05)
    launch.progress.step = 36  # after a failure, as the console says it
    launch.store()
    assert launch.flush(30.0)
    assert overview.read(storage / "a").step == 36


@pytest.mark.parametrize("is_over", [False, True])
def test_the_numbers_of_a_run_are_those_of_all_its_launches(start, storage, is_over):
    """A run that was stopped and resumed is not quicker than one that was not."""
    first = start("a")
    first.record(an_incident(resumed_step=15))
    end(first, "stopped")
    folder = storage / "a"
    began_s = time.time() - 60.0
    second = launches.open_launch(str(folder), "second", began_s, TrackingConfig(mlflow=False), {}, time.time)
    second.store()
    assert second.flush(30.0)
    if is_over:
        of_the_end = {"wall_s": 1000.0, "num_incidents": 1, "goodput": {"step": 900.0, "start": 100.0}}
        documents.write_json(folder / "summary.json", {"launch_id": "second", **of_the_end})
        documents.write_json(folder / outcome.FILE, {"launch_id": "second", "status": "finished"})
    run = overview.read(folder)
    second.close("FINISHED", PATIENCE_S)
    assert run.wall_s == (1000.0 if is_over else pytest.approx(160.0, abs=30.0))
    assert run.goodput == (0.9 if is_over else pytest.approx(80 / 160, abs=0.1))
    assert run.num_incidents == 1
    assert compare.results_of(run)["wall_s"] == run.wall_s


def test_an_end_is_the_outcome_of_the_newest_launch_alone(start, storage):
    launch = start("a")
    documents.write_json(storage / "a" / outcome.FILE, {"launch_id": "earlier", "status": "failed", "error": "x"})
    assert overview.read(storage / "a").kind == overview.LIVE
    end(launch, "finished")
    run = overview.read(storage / "a")
    assert (run.kind, run.state, run.stop_reason, run.left_s) == (overview.ENDED, "finished", "max_steps", None)


def test_a_driver_that_is_gone_is_reported(start, storage):
    launch = start("a")
    path = storage / "a" / "lease.json"
    lease = LEASE_KIND.read(path)
    launch.close("FINISHED", PATIENCE_S)
    for changes, state in (({"pid": 2**22 + 1}, "driver gone"), ({"released": True}, "ended without telling how")):
        LEASE_KIND.write(path, lease | changes)
        run = overview.read(storage / "a")
        assert (run.kind, run.state) == (overview.LOST, state)
    LEASE_KIND.write(path, lease | {"machine": "another"})
    assert overview.read(storage / "a").kind == overview.LIVE
    assert overview.read(storage / "a", now_s=time.time() + 100.0).state == "driver silent"


def test_what_is_damaged_is_reported_and_the_rest_is_shown(start, storage, capsys):
    end(start("a"), "finished")
    for name in ("launch.json", "lease.json", "summary.json", "gang.json", "outcome.json"):
        (storage / "a" / name).write_text("{")
    with open(storage / "a" / "tracking" / "metrics.jsonl", "a") as file:
        file.write('{"half')
    run = overview.read(storage / "a")
    assert run.kind == overview.UNKNOWN
    assert {problem.split()[0] for problem in run.problems} >= {"launch.json", "lease.json", "outcome.json"}
    assert run.metrics["loss"] == 2.5
    assert status.main([str(storage / "a")]) == 0
    printed = capsys.readouterr().out
    assert "launch.json cannot be read" in printed
    assert printed == "".join(f"{line.rstrip()}\n" for line in printed.splitlines())  # no spaces to the right


def test_a_checkpoint_that_was_committed_and_is_not_there_is_said(start, storage, capsys):
    start("a")
    status.main([str(storage / "a")])
    printed = capsys.readouterr().out
    assert "held out    loss 3.0000\n" in printed  # and not how fast it was
    assert "checkpoint  step 30\n" in printed
    row = layout.row_of(place_of(storage / "a") / "checkpoints")
    row.commit(row.newest().term, 30, Kept("30-1_0_00000000", ""))
    status.main([str(storage / "a")])
    said = "checkpoint  checkpoint 30 of this run was committed, and is not in"
    assert said in capsys.readouterr().out


def test_all_runs_of_a_storage_are_lines_those_that_go_on_first(start, storage, capsys):
    end(start("a"), "failed")
    start("b", loss=1.25)
    (storage / "no run").mkdir()
    assert status.main([str(storage)]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == " ".join(status.COLUMNS).split()
    assert first.split()[:8] == ["b", "training", "40/100", "1.2500", "4,000", "tokens/s", "0:30", "80%"]
    assert second.split()[:3] == ["a", "failed", "40/100"]
    assert status.main([str(storage), "--json"]) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)] == ["b", "a"]


def test_a_narrow_terminal_shows_what_matters_most(start, storage):
    start("a")
    shown = status.table([overview.read(storage / "a")], time.time(), 60)
    names = [column.header for column in shown.columns]
    assert names[:4] == ["run", "state", "step", "loss"]
    assert len(names) < len(status.COLUMNS)


@pytest.mark.parametrize("place", ["nowhere", "empty"])
def test_where_there_is_no_run_is_an_error(tmp_path, capsys, place):
    (tmp_path / "empty").mkdir()
    assert status.main([str(tmp_path / place)]) == EXIT_REFUSED
    assert "error: " in capsys.readouterr().err


def test_many_runs_are_read_quickly(start, storage, tmp_path):
    run_dir = Path(start("a").run_dir)
    for number in range(200):
        folder = tmp_path / "many" / f"run-{number}"
        (folder / "tracking").mkdir(parents=True)
        for name in ("launch.json", "lease.json", "gang.json", "tracking/metrics.jsonl"):
            os.link(run_dir / name, folder / name)
    began_s = time.process_time()
    assert len(status.look(str(tmp_path / "many"))) == 200
    assert time.process_time() - began_s < 2.0


def test_runs_are_compared_by_what_differs(start, storage, capsys):
    start("a", loss=2.0, model={"width": 8}, seed=0, name="a")
    start("b", loss=1.5, model={"width": 16}, seed=0, name="b")
    folders = [str(storage / name) for name in "ab"]
    assert compare.main([*folders, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == {"model.width": ["8", "16"]}
    assert [one["loss"] for one in found["results"]] == [2.0, 1.5]
    assert compare.main(folders) == 0
    said = capsys.readouterr().out
    assert "model.width" in said
    assert [line.split()[1:] for line in said.splitlines() if line.split()[:1] == ["loss"]] == [["2.0000", "*", "1.5000"]]
    told = {"loss": True, "goodput": False, "mine": None, "eval_f1": False, "word_error_rate": True, "eval_samples_per_s": False}
    assert {name: compare.is_lower_better(name) for name in told} == told
    assert compare.best([1.0, None, 1.0], True) == []
    nan = float("nan")
    assert [compare.best(values, True) for values in ([nan, 1.0, 2.0], [2.0, nan, 1.0], [nan, 1.0])] == [[1], [2], [1]]
    assert compare.best([float("inf"), 0.5], False) == [1], "no run is that good"
    assert compare.best([nan, nan], True) == []
    assert compare.best([2.0, 1.0, None, 1.0], True) == [1, 3], "two that are equal are both the best"
    with pytest.raises(SystemExit):
        compare.main(folders[:1])


def test_a_run_is_no_better_for_having_stopped_earlier_and_a_score_counts_by_its_setting():
    def best(steps=(40, 40), metrics=('["eval_bleu"]', '["eval_bleu"]'), lower="None"):
        settings = [{"evaluation.score.metrics": each, "evaluation.score.lower_better": lower} for each in metrics]
        results = [
            {"step": step, "wall_s": wall_s, "score": wall_s, "eval_bleu": 5.0}
            for step, wall_s in zip(steps, (1.0, 2.0), strict=True)
        ]
        return compare.best_of(settings, results)

    assert best() == {"wall_s": [0], "score": [1]}
    assert best(steps=(20, 40)) == {"score": [1]}
    assert best(lower="True") == {"wall_s": [0], "score": [0]}
    assert best(metrics=('["eval_bleu"]', '["eval_loss"]')) == {"wall_s": [0]}
    assert compare.best_of([{}, {}], [{"step": 1, "score": 1.0}, {"step": 1, "score": 2.0}]) == {}


def test_a_storage_stands_for_its_runs_and_what_is_no_run_is_named(start, storage, capsys):
    start("a", seed=0)
    start("b", seed=1)
    for other in ("notes", "empty/checkpoints"):
        (storage / other).mkdir(parents=True)
    assert compare.main([str(storage), "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert [Path(run).name for run in found["runs"]] == ["a", "b"]
    assert found["settings"] == {"seed": ["0", "1"]}
    assert f"left out of {storage}, for they are no runs with settings: 2 (empty, notes)" in said.err
    assert compare.main([str(storage / "notes"), str(storage)]) == 2
    assert "is not a run's folder" in capsys.readouterr().err


def an_incident(**changes):
    found = {
        "kind": "process_crash",
        "host": 1,
        "generation": 0,
        "step": 17,
        "failed_at_s": 1000.0,
        "action": "restart",
    }
    evidence = {"summary": "host 1 died", "step": 17, "stack": "line 1\nline 2", "log_tail": ["last", "words"]}
    return Incident(**found | {"evidence": evidence} | changes)


def test_the_incidents_of_all_launches_are_reported_and_one_with_its_evidence(start, storage, capsys):
    launch = start("a")
    over = an_incident(resumed_step=15)
    launch.record(over)
    over.mark("first_step", 1000.5)
    launch.update(over)
    launch.record(an_incident(failed_at_s=2000.0, step=None))
    assert launch.flush(30.0)
    run = str(storage / "a")
    assert incidents.main([run]) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert "process crash" in first
    assert "0.50 s" in first
    assert "2 steps" in first, "those between the failure and the checkpoint"
    assert "not over yet" in second
    assert first.rstrip().endswith("host 1 died"), "its cause, in the same line: nobody looks who is not shown it"
    assert status.main([run]) == 0
    assert "incidents   2; the newest: host 1 died" in capsys.readouterr().out
    assert incidents.main([run, "--number", "1"]) == 0
    told = capsys.readouterr().out
    assert "host 1 died" in told
    assert "    line 2" in told
    assert told.endswith("\n  log tail\n    last\n    words\n"), "the end of a log is lines, and no list"
    assert told.count("17") == 1, "the step is told once"
    assert "first step 0.50\u00a0s" in told
    assert incidents.main([run, "--number", "3"]) == EXIT_REFUSED
    assert "the run has 2 incidents" in capsys.readouterr().err


def test_no_steps_are_replayed_after_a_checkpoint_that_is_newer_than_the_last_step_heard_of():
    """Heartbeats come now and then: a host may have saved a step that it has not told."""
    assert [an_incident(resumed_step=step).replayed_steps for step in (15, 18, None)] == [2, 0, 0]


def test_an_incident_of_a_newer_program_is_refused_by_name(start, storage, capsys):
    launch = start("a")
    launch.record(an_incident())
    assert launch.flush(30.0)
    path = storage / "a" / "incidents.jsonl"
    line = {key: value for key, value in json.loads(path.read_text()).items() if key != "digest"}
    path.write_text(json_text.seal(line | {"format": 99}, None))
    assert incidents.main([str(storage / "a")]) == EXIT_REFUSED
    assert "was written by a newer gangway" in capsys.readouterr().err


def test_a_damaged_record_of_the_gang_is_reported_by_profile(start, storage, capsys):
    end(start("a"), "finished")
    (storage / "a" / "gang.json").write_text("{")
    assert profile.main([str(storage / "a")]) == EXIT_REFUSED
    assert "gang.json: damaged" in capsys.readouterr().err


def log(run_dir, host, text, name="process-1-0001.log"):
    folder = Path(run_dir, "logs", f"host-{host:04}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def test_the_last_lines_of_the_newest_logs(start, storage, capsys):
    run_dir = start("a").run_dir
    assert logs.main([run_dir]) == EXIT_REFUSED
    assert "no logs yet" in capsys.readouterr().err
    log(run_dir, 0, "old\n", "process-1-0000.log")
    os.utime(Path(run_dir, "logs", "host-0000", "process-1-0000.log"), (1, 1))
    log(run_dir, 0, "one\ntwo\nthree \x1b[2J\n")
    log(run_dir, 0, "", "process-1-0002.log")
    log(run_dir, 3, "four\n")
    assert logs.main([run_dir, "--lines", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("==>")] == ["two", "three ·[2J", "four"]
    assert logs.main([run_dir, "--host", "3"]) == 0
    assert "four" in capsys.readouterr().out
    assert logs.main([run_dir, "--host", "1"]) == EXIT_REFUSED
    assert "no log of host 1; there are those of: 0, 3" in capsys.readouterr().err


def test_what_is_added_to_a_log_is_shown_line_by_line(tmp_path):
    path, sizes = tmp_path / "logs" / "host-0000" / "process-1.log", {}
    path.parent.mkdir(parents=True)

    def added(text):
        path.write_text(text)
        (log,) = logs.newest(tmp_path, None)
        return list(logs._added(log, sizes))

    assert added("one\ntw") == ["one"]
    assert added("one\ntwo\n") == ["two"]
    assert added("new\n") == ["new"], "it was emptied, for it had grown too large"


def test_a_request_waits_for_what_comes_of_it(start, storage, monkeypatch):
    monkeypatch.setattr(asking, "LOOK_EVERY_S", 0.01)
    launch = start("a")
    answers = []
    for kind, what in (("save", lambda: launch.saved(41, "there")), ("stop", lambda: end(launch, "stopped"))):
        asks = threading.Thread(target=lambda kind=kind: answers.append(asking.ask(storage / "a", kind, PATIENCE_S)))
        asks.start()
        assert wait_until(lambda: launch.store() or not launch._requests.empty())
        assert [request.kind for request in launch.new_requests()] == [kind]
        what()
        asks.join(PATIENCE_S)
    assert answers == [(True, "a: saved at step 41; it goes on"), (True, "a: stopped; saved at step 41")]
    with pytest.raises(NoRunError, match="does not go on now: stopped"):
        asking.ask(storage / "a", "stop", 1.0)


def test_a_launch_that_takes_the_run_over_meanwhile_is_asked_too(start, storage, monkeypatch):
    monkeypatch.setattr(asking, "LOOK_EVERY_S", 0.01)
    end(start("a"), "failed")
    looks = iter([overview.read(storage / "a")])
    live = dataclasses.replace(next(looks), kind=overview.LIVE, state="training", launch_id="first")
    seen = [live, live, dataclasses.replace(live, launch_id="second")]
    ended = dataclasses.replace(live, kind=overview.ENDED, state="stopped", launch_id="second")
    asked = []
    monkeypatch.setattr(asking.overview, "read", lambda folder: seen.pop(0) if seen else ended if len(asked) == 2 else live)
    monkeypatch.setattr(asking.requests, "send", lambda run, kind, launch: asked.append(launch) or "path")
    monkeypatch.setattr(asking.requests, "is_waiting", lambda path: True)
    done, line = asking.ask(storage / "a", "stop", PATIENCE_S)
    assert (done, asked) == (True, ["first", "second"])
    assert line.startswith("a: stopped")


def test_a_request_that_nobody_reads_is_reported(start, storage, capsys):
    run_dir = start("a").run_dir
    assert asking.main("stop", "orchestrator.runs.stop", "", [run_dir, "--timeout", "0.1"]) == asking.EXIT_NOT_DONE
    assert "the driver has not read the request; the run is training" in capsys.readouterr().out


# ---------------------------------------------------------------------- sweep

JOB = "max_num_steps: 5\ndata: {paths: [a]}\nhosts: {count: 1}\n"
STAND_IN = """
import json, os, pathlib, signal, sys, time
*_, path, first, second, name = sys.argv
assert os.getsid(0) == os.getpid(), "the Ctrl-C of a terminal comes twice"
ends = {"job-seed-2": 7, "job-seed-5": 3}
with open("called", "a") as called:
    print(json.dumps([path, first, second, name]), file=called)
if name.endswith("-9"):
    def stop(number, frame):
        pathlib.Path("got").write_text(str(int(number)))
        sys.exit(3)
    signal.signal(signal.SIGINT, stop), signal.signal(signal.SIGTERM, stop)
    pathlib.Path("waits").touch()
    time.sleep(60)
sys.exit(ends.get(name.removeprefix("name="), 0))
"""
"""Stands for the process of a run."""


@pytest.fixture
def swept(tmp_path, monkeypatch, storage, capsys):
    """Calls the command on a file of this folder; returns its status and what it printed, and what the processes were called
    with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "RUN", ("-c", STAND_IN))
    monkeypatch.setattr(terminal, "ignores", lambda number: False)
    Path("job.yaml").write_text(JOB)

    def swept(*words):
        status = sweep.main(["job.yaml", *words, f"storage={storage}"])
        called = [json.loads(line) for line in Path("called").read_text().splitlines()] if Path("called").exists() else []
        Path("called").unlink(missing_ok=True)
        return status, capsys.readouterr(), called

    return swept


def test_a_sweep_is_the_product_of_its_values_each_with_a_name_that_storage_takes(swept, storage):
    status, printed, called = swept("optimizer.learning_rate=1e-3, 5e-4", "seed=1,2", "max_num_steps=9", "--dry-run")
    rows = [line.split() for line in printed.out.splitlines()]
    assert [(row[0].removeprefix(f"{storage}/"), row[2]) for row in rows] == [
        ("job-learning_rate-1e-3-seed-1", "seed=1"),
        ("job-learning_rate-1e-3-seed-2", "seed=2"),
        ("job-learning_rate-5e-4-seed-1", "seed=1"),
        ("job-learning_rate-5e-4-seed-2", "seed=2"),
    ]
    assert {row[3] for row in rows} == {"max_num_steps=9"}
    assert (status, called, storage.exists()) == (0, [], False)
    # Of a list, of quotes, of a secret, and of a long value the name has a digest.
    given = [f"data.paths=[a,b],['{'c,d' * 100}']", "hosts.env.KEY=canary,other"]
    runs = sweep.runs_of("job.yaml", given)
    assert [config.training.data.paths for config in runs.values()] == [("a", "b")] * 2 + [("c,d" * 100,)] * 2
    assert [config.hosts.env["KEY"] for config in runs.values()][:2] == ["canary", "other"]
    names = [config.training.name for config in runs.values()]
    assert len({*names}) == 4
    assert max(map(len, names)) < 150
    assert "canary" not in "".join(names)
    others = sweep.runs_of("job.yaml", [f"data.paths=['{'c,d' * 100}'],[h]", given[1]])
    assert [config.training.name for config in others.values()][:2] == names[2:]


def test_all_that_is_wrong_with_a_sweep_is_told_before_anything_runs(swept, storage):
    status, printed, called = swept("seed=1,,x", "max_num_steps=1,0", "sed=3")
    assert (status, called, storage.exists()) == (2, [], False)
    for line in (
        "a comma has no value beside it; write null for none (first with seed= max_num_steps=1)",
        'override: seed: expected an integer (found "x") (first with seed=x max_num_steps=1)',
        "override: sed: unknown key (found 3); did you mean seed? (first with seed=1 max_num_steps=1)",
    ):
        assert printed.err.count(line) == 1
    assert "max_num_steps = 0" in printed.err
    status, printed, called = swept("optimizer.learning_rate=1e-3,0.001", "seed=1,2")
    assert (
        "the same settings as another run; give each value once (first with optimizer.learning_rate=0.001 seed=1)" in printed.err
    )
    assert "no key has several values, such as seed=1,2" in swept("seed=1")[1].err
    assert (status, called) == (2, [])


def test_a_run_that_fails_is_named_and_the_others_run_and_are_compared(swept, start, storage):
    for seed, loss in ((1, 2.0), (2, 1.0), (3, 1.5)):
        start(f"job-seed-{seed}", loss=loss, seed=seed)
    status, printed, called = swept("seed=1,2,3")
    assert called == [["job.yaml", f"seed={seed}", f"storage={storage}", f"name=job-seed-{seed}"] for seed in (1, 2, 3)]
    assert status == 1
    assert "error: 1 of 3 runs failed: job-seed-2 (exit status 7)\n" in printed.err
    rows = {line.split()[0]: line.split()[1:] for line in printed.out.splitlines() if line.strip()}
    assert (rows["seed"], rows["loss"]) == (["1", "3"], ["2.0000", "*", "1.5000"])
    # The next call asks each run again, and one that somebody else has stopped keeps nobody up.
    start("job-seed-5", seed=5)
    status, printed, called = swept("seed=5,1")
    assert [words[1] for words in called] == ["seed=5", "seed=1"]
    assert (status, printed.err) == (3, "stopped: 1 of 2 runs have finished; the same command continues the others\n")
    assert swept("seed=1,3")[0] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_the_present_run_of_a_sweep_and_no_further_one_begins(swept, start, number):
    start("job-seed-1", seed=1)
    before = signal.getsignal(number)

    def strike():
        wait_until(Path("waits").exists)
        os.kill(os.getpid(), number)

    striking = threading.Thread(target=strike)
    striking.start()
    status, printed, called = swept("seed=1,9,3")
    striking.join()
    assert [words[1] for words in called] == ["seed=1", "seed=9"]
    assert (status, Path("got").read_text()) == (3, str(int(signal.SIGTERM)))
    assert printed.err == "stopped: 1 of 3 runs have finished; the same command continues the others\n"
    assert signal.getsignal(number) == before


def test_a_signal_while_a_run_of_a_sweep_is_being_started_reaches_it(swept, monkeypatch):
    started = subprocess.Popen

    def starting(*given, **named):
        child = started(*given, **named)
        signal.raise_signal(signal.SIGINT)
        return child

    monkeypatch.setattr(subprocess, "Popen", starting)
    status, printed, _ = swept("seed=9,1")
    assert (status, printed.err) == (3, "stopped: 0 of 2 runs have finished; the same command continues the others\n")

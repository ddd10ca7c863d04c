"""The schedule and the score of `chaos`."""

import os
import pickle
import random
import shlex
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from gangway.storage.opening import place_of
from orchestrator import run
from orchestrator.config.job import load
from orchestrator.faultlab.chaos import command as chaos
from orchestrator.faultlab.chaos import faults as chaos_faults
from orchestrator.faultlab.chaos import injectors
from orchestrator.faultlab.chaos.command import Pace
from orchestrator.faultlab.chaos.faults import KINDS, overrides_for, schedule
from orchestrator.faultlab.chaos.injectors import Fault, Injection, flipped, pick_file
from orchestrator.faultlab.chaos.score import Disturbed, match, score, times_outside, unfinished_files, what_is_wrong
from orchestrator.faultlab.testbed import clock as chaos_clock
from orchestrator.faultlab.testbed import live_run
from orchestrator.faultlab.testbed.local_cluster import Cluster
from orchestrator.faultlab.verify import command as verify
from tests import ROOT
from tests.unit.trainers.checkpoint.test_layout import put


def injection(kind, incidents_before=0, host=1, **more):
    return Injection(kind, host, 0.0, 0.0, {}, incidents_before, **more)


def incident(kind, host=1, first_step=0.4, resumed_step=20):
    recovery = {"detect": 0.1, "first_step": first_step}
    about = {"kind": kind, "host": host, "step": 40, "resumed_step": resumed_step, "failed_at_s": 1.0}
    return {**about, "recovery_s": recovery, "total_s": 0.1 + first_step}


def summary(**changes):
    plain = {"status": "finished", "params_digest": "p", "samples_digest": "s", "incidents": [], "lineage": None}
    return {**plain, "goodput": {"step": 60.0, "start": 40.0}, "wall_s": 100.0, **changes}


def scored(injections, incidents, reference=None, left=(), not_shipped=None, **changes):
    planned = [Fault(s.kind, s.host, 0.0, 0) for s in injections]
    run = Disturbed(injections, summary(incidents=incidents, **changes), left, not_shipped, None, 0.0, 110.0)
    return score(planned, {}, run, reference or summary())


def failed(result):
    return [name for name, good in result.checks.items() if not good]


def test_the_same_seed_gives_the_same_schedule_and_another_seed_another():
    kinds = [*KINDS]
    assert schedule(kinds, 36, 4, 7, 1.0) == schedule(kinds, 36, 4, 7, 1.0)
    assert schedule(kinds, 36, 4, 7, 1.0) != schedule(kinds, 36, 4, 8, 1.0)


def test_a_schedule_has_each_kind_equally_often_on_existing_hosts():
    made = schedule(["process", "hang", "nan"], 9, 3, 0, 2.0)
    assert Counter(fault.kind for fault in made) == {"process": 3, "hang": 3, "nan": 3}
    assert {fault.host for fault in made} <= {0, 1, 2}
    assert all(0 <= fault.delay_s <= 2 for fault in made)


def test_hang_like_kinds_bring_a_small_limit_of_the_watchdog():
    assert overrides_for({"process", "tracking"}) == []
    assert overrides_for({"hang", "freeze"}) == ["driver.watchdog.step_floor_s=4", "driver.watchdog.save_s=6"]


def test_an_incident_belongs_to_the_last_injection_before_it_was_known():
    injections = [injection("process", 1), injection("slow", 2), injection("driver", 2)]
    before, first, late = incident("process_crash"), incident("process_crash"), incident("driver_lost", host=None)
    assert match(injections, [before, first, late]) == ([before], [[first], [], [late]])
    assert match([], [before]) == ([before], [])


@pytest.mark.parametrize(
    ("kind", "found", "wrong"),
    [
        ("process", [incident("process_crash")], None),
        ("process", [], "not noticed"),
        ("process", [incident("host_lost")], "named host_lost, expected process_crash"),
        ("process", [incident("process_crash", host=0)], "named host 0, the fault was on host 1"),
        ("driver", [incident("driver_lost", host=None)], None),
        ("tracking", [], None),
        ("tracking", [incident("driver_lost")], "named driver_lost, expected nothing"),
        ("slow", [], "not noticed"),
        ("slow", [incident("straggler")], None),
        ("process", [incident("straggler", host=0), incident("process_crash")], None),
        ("process", [incident("resize", host=None), incident("process_crash")], None),
        ("slow", [incident("hang")], "named hang, expected straggler"),
        ("vanish", [incident("process_crash", resumed_step=None), incident("storage_error", host=0)], None),
        ("vanish", [incident("process_crash")], "followed by nothing, expected storage_error"),
        ("storage_hang", [], None),
        ("storage_hang", [incident("hang", host=None)], None),
        (
            "storage_hang",
            [incident("hang", host=None), incident("host_lost")],
            "followed by host_lost, which is not what happened",
        ),
        ("storage_hang", [incident("host_lost")], "named host_lost, expected hang or storage_error"),
        ("stall", [incident("host_lost")], "named host_lost, expected nothing"),
        (
            "vanish",
            [incident("process_crash"), incident("storage_error"), incident("user_error")],
            "followed by storage_error, user_error, expected storage_error",
        ),
    ],
)
def test_what_is_wrong_with_how_an_injection_was_taken(kind, found, wrong):
    assert what_is_wrong(injection(kind), found) == wrong


def test_no_run_may_start_again_from_before_its_checkpoints():
    injected = injection("process", oldest_checkpoint=20)
    assert what_is_wrong(injected, [incident("process_crash", resumed_step=20)]) is None
    wrong = what_is_wrong(injected, [incident("process_crash", resumed_step=0)])
    assert wrong == "went on from step 0, with a checkpoint of step 20"


def test_a_score_passes_only_if_everything_is_as_it_should_be():
    injected, shown = [injection("process")], [incident("process_crash")]
    assert scored(injected, shown).passed
    assert failed(scored(injected, shown, status="failed")) == ["finished", "the exit status is 0, and the run failed"]
    assert failed(scored(injected, shown, params_digest="q")) == ["final parameters equal to the reference run's, bit for bit"]
    assert failed(scored(injected, shown, summary(samples_digest="t"))) == ["the same samples, each once"]
    assert failed(scored(injected, shown, wall_s=101.0)) == ["the ledger's categories sum to the wall clock"]
    assert failed(scored(injected, shown, left=["process 12: python"])) == ["nothing left behind"]
    assert failed(scored(injected, shown, not_shipped="3 entries are left")) == ["all metrics have arrived: 3 entries are left"]
    assert failed(scored(injected, [])) == ["each was noticed, and named with its host"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"failed_at_s": 3601.0}, ["incident 0: 3601 s after the start, for 0 s"]),
        ({"failed_at_s": -3599.0, "total_s": 3600.0}, ["incident 0: -3599 s after the start, for 3600 s"]),
        ({"recovery_s": {"detect": -0.5}}, ["incident 0: 1 s after the start, for 0 s"]),
    ],
)
def test_an_hour_that_was_none_is_seen(changes, told):
    run = Disturbed([], summary(incidents=[incident("process_crash") | changes]), [], None, None, 0.0, 100.0)
    assert times_outside(run) == told
    run.summary["wall_s"] = 3700.0
    assert times_outside(run) == ["it lasted 3700 s", *told]
    assert "no time is recorded that is not within the run" in failed(score([], {}, run, summary()))


def test_a_clock_is_set_for_all_who_look_at_it(tmp_path, monkeypatch):
    before_s = time.time()
    monkeypatch.setattr(time, "time", time.time)  # put back at the end
    monkeypatch.setattr(time, "time_ns", time.time_ns)
    chaos_clock.set_ahead(tmp_path / "clock", 0.0)
    chaos_clock.deceive(str(tmp_path / "clock"))
    for ahead_s in (0.0, 3600.0, -3600.0):
        chaos_clock.set_ahead(tmp_path / "clock", ahead_s)
        assert time.time() == pytest.approx(before_s + ahead_s, abs=600)
        assert time.time_ns() == pytest.approx((before_s + ahead_s) * 1e9, abs=600e9)
    assert pickle.loads(pickle.dumps(time.time)) is time.time


def test_digests_that_are_missing_are_not_equal():
    assert "the same samples, each once" in failed(scored([], [], summary(samples_digest=None), samples_digest=None))


def test_a_finished_run_whose_command_says_otherwise_is_reported():
    run = Disturbed([], summary(incidents=[]), [], None, None, 0.0, 110.0, exit_status=1)
    assert failed(score([], {}, run, summary())) == ["the exit status is 1, and the run finished"]


def test_faults_that_were_not_injected_are_missed():
    planned = [Fault("process", 0, 0.0, 0)] * 2
    run = Disturbed([injection("process")], summary(incidents=[incident("process_crash")]), [], None, None, 0.0, 110.0)
    result = score(planned, {}, run, summary())
    assert failed(result) == ["1 of 2 faults injected"]


def test_a_run_that_had_to_be_ended_is_scored_all_the_same():
    cut_short = {"status": "ended by chaos", "incidents": [], "goodput": {}, "wall_s": 0.0}
    run = Disturbed([injection("process")], cut_short, [], None, "waited 240 s for the run to be ready for a fault", 0.0, 9.0)
    result = score([Fault("process", 0, 0.0, 0)], {}, run, chaos.NO_REFERENCE)
    assert "waited 240 s for the run to be ready for a fault" in failed(result)
    assert "finished" in failed(result)
    assert result.to_dict()["passed"] is False


def test_recovery_is_reported_by_kind():
    injections = [injection("process"), injection("process", 1), injection("tracking", 2)]
    result = scored(injections, [incident("process_crash"), incident("process_crash", first_step=0.9)])
    assert result.recovery_by_kind() == {"process": [pytest.approx(0.5), pytest.approx(1.0)]}
    assert result.to_dict()["median_recovery_s"] == {"process": pytest.approx(0.75)}


class Paced:
    """A run of which only the newest checkpoint and the pace are looked at."""

    def __init__(self, step=None):
        self.step, self.paces = step, []

    def checkpoints(self):
        return [] if self.step is None else [Path(str(self.step))]

    def pace(self, step_s):
        self.paces.append(step_s)


@pytest.mark.parametrize(
    ("max_steps", "step", "faults", "step_s"),
    [(None, 0, 3, None), (600, 600, 1, None), (600, None, 3, 0.06), (600, 590, 3, 0.15)],
)
def test_a_run_is_slowed_down_as_much_as_the_faults_that_are_to_come_need(max_steps, step, faults, step_s):
    run = Paced(step)
    Pace(run, max_steps).share_out(faults)
    assert run.paces == ([] if step_s is None else [pytest.approx(step_s)])


def test_a_recovery_that_takes_long_does_not_use_up_the_steps_of_the_faults_after_it(monkeypatch):
    monkeypatch.setattr(Pace, "LOOK_S", -1.0)
    run = Paced(200)
    pace = Pace(run, 600, lambda: 0.0)
    pace.share_out(4)
    seconds = 0.0
    for step in range(200, 300):
        run.step = None if step == 290 else step  # a folder of checkpoints that is gone for a while
        pace.keep()
        seconds += run.paces[-1]
    assert run.paces == sorted(run.paces)
    assert (run.paces[0], run.paces[-1]) == pytest.approx((0.12, 3.0))
    assert seconds > 24  # 12 if steps stayed as fast
    run.step = 300
    pace.share_out(3)
    assert run.paces[-1] == pytest.approx(0.12)


def test_steps_that_are_left_last_as_long_as_was_waited(monkeypatch):
    """Else a run whose standbys take half a minute to start, on a busy machine, ends before its last fault."""
    monkeypatch.setattr(Pace, "LOOK_S", -1.0)
    run, now = Paced(300), {"s": 50.0}
    pace = Pace(run, 400, lambda: now["s"])
    pace.share_out(1)
    for now["s"], run.step in ((60.0, 340), (80.0, 360), (90.0, 380), (150.0, 380)):
        pace.keep()
    assert run.paces == pytest.approx([0.12, 10 / 60, 30 / 40, 40 / 20, 3.0])
    run.step = 320
    pace.share_out(1)
    assert run.paces[-1] == pytest.approx(0.15)


class Recovering(Paced):
    """It takes 95 steps to recover from its fault; a step is as long as a look at it."""

    between_looks = None
    wait, full_speed = live_run.Run.wait, live_run.Run.full_speed

    def __init__(self):
        super().__init__(0)

    def running(self):
        return True

    def standbys_are_warm(self):
        return True

    def checkpoints(self):
        self.step += 1
        return super().checkpoints()

    def incidents(self):
        return [incident("process_crash")] if self.step >= 95 else []

    def now_s(self):
        return 100.0

    def saved_after(self, at_s):
        return True


def test_steps_get_slower_while_a_recovery_is_waited_for_and_are_fast_in_the_end(monkeypatch):
    """Half of the steps are the fault's, and half are spare."""
    monkeypatch.setattr(Pace, "LOOK_S", -1.0)
    monkeypatch.setattr(live_run, "POLL_S", 0.0)
    monkeypatch.setattr(chaos.faults, "inject", lambda testbed, fault: injection("process"))
    run = Recovering()
    chaos.inject_all(injectors.Testbed(run), [Fault("process", 0, 0.0, 0)], 200, injections := [])
    assert len(injections) == 1
    run.between_looks()
    assert run.paces == [*sorted(run.paces[:-1]), None]
    assert run.paces[0] == pytest.approx(12 / 98, abs=0.01)
    assert run.paces[-2] > 1.0


def test_hosts_are_a_number_or_a_range():
    assert chaos.hosts_overrides(None) == []
    assert chaos.hosts_overrides("3") == ["hosts.count=3"]
    assert chaos.hosts_overrides("2-4") == ["hosts.min=2", "hosts.max=4", "hosts.count=null"]


@pytest.mark.parametrize(
    "line",
    [
        "x.yaml a=1 --faults process,agent,nan b=2",
        "x.yaml a=1 --faults process agent nan b=2",
        "--faults process agent,nan x.yaml a=1 b=2",
        "x.yaml --faults 'process, agent nan' a=1 b=2",
        "x.yaml --faults process, agent, nan a=1 b=2",
    ],
)
def test_a_list_of_faults_has_commas_or_spaces(line):
    given = chaos.parse(shlex.split(line))
    assert given.kinds == ["process", "agent", "nan"]
    assert (given.config, given.overrides) == ("x.yaml", ["a=1", "b=2"])


@pytest.mark.parametrize(
    ("options", "overrides", "steps"),
    [
        ([], [], 320),
        (["--count", "10"], [], 880),
        (["--faults", "nan"], ["max_num_steps=160"], None),
        (["--faults", "nan"], ["max_num_steps=159"], 160),
        (["--faults", "nan"], ["checkpoint.save_steps=100"], 400),
        (["--full-speed"], [], None),
        ([], ["max_num_steps=null", "max_num_data_epochs=1", "optimizer.schedule.name=constant"], None),
    ],
)
def test_a_run_that_would_be_over_before_its_faults_is_lengthened(options, overrides, steps):
    given = chaos.parse(["configs/tiny.yaml", *overrides, *options])
    line, override = chaos.enough_steps(given, load(str(ROOT / "configs" / "tiny.yaml"), given.overrides))
    assert override == (f"max_num_steps={steps}" if steps else None)
    assert steps is None or f"need {steps}: it gets" in line.replace("needs", "need")


def test_the_name_of_a_run_is_not_used_twice(tmp_path):
    config = load(str(ROOT / "configs" / "tiny.yaml"), [f"storage={tmp_path}"])
    assert chaos.fresh_name(config)[1] is None
    for taken in ("tiny", "tiny-2-reference"):
        (tmp_path / taken).mkdir()
        (tmp_path / taken / "launch.json").write_text("{}")
    assert chaos.fresh_name(config) == (f"there is a run tiny in {tmp_path} already: this one is tiny-3", "name=tiny-3")


@pytest.mark.parametrize(
    ("lineage", "skipped", "plain"),
    [
        (None, None, True),
        ([{"num_hosts": 2}], [], True),
        ([{"num_hosts": 2}], [7], False),
        ([{"num_hosts": 1}], [], False),
        ([{"num_hosts": 2}, {"num_hosts": 1}], [], False),
    ],
)
def test_only_a_run_that_changed_its_course_needs_a_replay(lineage, skipped, plain):
    assert chaos.is_plain({"lineage": lineage, "skipped_batches": skipped}, hosts=2) == plain


@pytest.mark.parametrize("parse", [chaos.parse, run.parse, verify.parse])
def test_options_may_stand_between_overrides(parse):
    option = {chaos.parse: ["--seed", "3"], run.parse: ["--dry-run"], verify.parse: ["--steps", "9"]}[parse]
    given = parse(["x.yaml", "name=a", *option, "storage=b"])
    assert (given.config, given.overrides) == ("x.yaml", ["name=a", "storage=b"])


def test_help_says_what_each_kind_does(capsys):
    with pytest.raises(SystemExit):
        chaos.parse(["--help"])
    said = capsys.readouterr().out
    assert all(f"  {name} " in said and kind.about in said for name, kind in KINDS.items())


def test_an_unknown_kind_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        chaos.parse(["x.yaml", "--faults", "process,earthquake"])
    assert "--faults earthquake: expected some of process, freeze" in capsys.readouterr().err


def test_damage_changes_one_byte_of_a_file_that_has_some(tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "state" / "data").write_bytes(bytes(100))
    rng = random.Random(0)
    assert pick_file(place_of(tmp_path), rng) == "state/data"
    damaged = flipped(bytes(100), rng)
    assert len(damaged) == 100
    assert sum(byte != 0 for byte in damaged) == 1


def test_unfinished_files_are_found(tmp_path):
    run = place_of(tmp_path)
    put(run / "checkpoints", 20)
    (run / "checkpoints" / "40-1_0_0000ab12" / "state" / "d").put(b"")
    (tmp_path / "launch.json.0a.tmp").touch()
    assert unfinished_files(run) == ["a checkpoint that no record names: 40-1_0_0000ab12", "file launch.json.0a.tmp"]


class Shrunk:
    """A run of which three hosts are left."""

    def members(self):
        return dict.fromkeys(range(3))

    def incidents(self):
        return [{}]

    def checkpoints(self):
        return [Path("20"), Path("40")]

    def now_s(self):
        return 100.0

    def wait(self, condition, what):
        return condition()


def test_a_fault_that_was_dealt_to_a_host_that_is_no_more_comes_to_one_that_is(monkeypatch):
    injected = []
    monkeypatch.setitem(
        chaos_faults.KINDS, "process", chaos_faults.Kind("", lambda testbed, fault: injected.append(fault.host) or {})
    )
    made = chaos_faults.inject(injectors.Testbed(Shrunk()), Fault("process", 3, 0.0, 0))
    assert (injected, made.host) == ([0], 0)
    assert (made.incidents_before, made.oldest_checkpoint) == (1, 20)


class Reported:
    """A run as its files tell it."""

    def __init__(self, *incidents, saved_at_s=0.0):
        self.known, self.saved_at_s = [*incidents], saved_at_s

    def incidents(self):
        return self.known

    def checkpoints(self):
        return [Path("20")]

    def now_s(self):
        return 100.0

    def saved_after(self, at_s):
        return self.saved_at_s > at_s


def test_a_fault_is_overcome_when_it_has_shown_a_step_has_followed_and_then_a_checkpoint():
    run = Reported(incident("process_crash"))
    overcome = chaos.Overcome(injectors.Testbed(run), injections := [])
    assert overcome()
    injections.append(injection("vanish", 1))
    run.saved_at_s = 200.0
    assert not overcome()  # nothing has shown
    run.known += [incident("process_crash", resumed_step=None), incident("storage_error", resumed_step=None)]
    assert not overcome()
    run.known[-1] = incident("storage_error")
    run.saved_at_s = 99.0
    assert not overcome()
    run.saved_at_s = 101.0
    assert overcome()  # that the first of the two never came to a step is no matter


class Disk:
    def __init__(self):
        self.frozen = False

    def freeze(self):
        self.frozen = True

    def thaw(self):
        self.frozen = False


@pytest.mark.parametrize("written", [None, "0001/host-0000.txt", "new"])
def test_what_is_written_through_a_planted_link_is_seen(tmp_path, monkeypatch, written):
    (tmp_path / "run" / "incidents").mkdir(parents=True)
    run = SimpleNamespace(run_dir=place_of(tmp_path / "run"), orders=tmp_path / "faults")
    monkeypatch.setattr(injectors, "kill_process", lambda testbed, fault: {"pid": 1})
    details = injectors.plant_links(injectors.Testbed(run), Fault("planted_link", 0, 0.0, 0))
    assert details["planted"] == ["previews", "figures", "requests"]  # what was there stays what it is
    if written is not None:
        (tmp_path / "run" / "previews" / written).write_text("ours")
    made = Injection("planted_link", 0, 0.0, 0.0, details, 0)
    injectors.take_links_away(injectors.Testbed(run), made)
    assert (made.problem is None) == (written is None)
    assert os.listdir(tmp_path / "run") == ["incidents"]


@pytest.mark.parametrize(("taken", "problem"), [({}, None), (None, "no step was taken while the storage hung")])
def test_a_run_whose_storage_hangs_must_take_a_step_meanwhile(taken, problem):
    disk = Disk()
    run = SimpleNamespace(order=lambda host, kind, **settings: "1-slow", taken=lambda order: taken if disk.frozen else {})
    testbed = injectors.Testbed(run, disk=disk)
    made = Injection("storage_hang", 0, 0.0, 0.0, injectors.freeze_storage(testbed, Fault("storage_hang", 0, 0.0, 0)))
    assert disk.frozen
    injectors.thaw_storage(testbed, made)
    assert not disk.frozen
    assert what_is_wrong(made, []) == problem


def test_each_kept_train_step_is_damaged_and_the_injection_shows_when_that_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(injectors, "kill_process", lambda testbed, fault: {})
    names = ("train_step-1.xla", "train_step-2.xla", "train_step-1.json", "eval_step-1.xla")
    for name in names:
        (tmp_path / name).write_bytes(bytes(100))
    console = ["host 0: train_step-1.xla could not be loaded (OSError): compiling again"]
    testbed = injectors.Testbed(SimpleNamespace(console=lambda: "\n".join(console)), programs=tmp_path)
    made = Injection("program", 0, 0.0, 0.0, injectors.flip_programs(testbed, Fault("program", 0, 0.0, 0)))
    changed = [sum(byte != 0 for byte in (tmp_path / name).read_bytes()) for name in names]
    assert changed == [1, 1, 0, 0]
    assert not injectors.a_program_was_refused(testbed, made)
    console.append("host 1: train_step-2.xla could not be loaded (DamagedProgramError: ...): compiling again")
    assert injectors.a_program_was_refused(testbed, made)
    for name in names[:2]:
        (tmp_path / name).unlink()
    with pytest.raises(injectors.RunError, match="no host has kept its train step"):
        injectors.flip_programs(testbed, Fault("program", 0, 0.0, 0))


def test_checkpoints_that_were_taken_away_come_back_over_what_was_written_in_their_place(tmp_path, monkeypatch):
    monkeypatch.setattr(injectors, "kill_process", lambda testbed, fault: {})
    run = SimpleNamespace(run_dir=place_of(tmp_path))
    (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    for number, salt in enumerate((0, 1)):
        details = injectors.take_checkpoints_away(injectors.Testbed(run), Fault("vanish", 0, 0.0, salt))
        assert (tmp_path / "checkpoints").exists() == details["empty"] == bool(salt)
        (tmp_path / "checkpoints" / "0").mkdir(parents=True)
        made = Injection("vanish", 0, 0.0, 0.0, details, number)
        injectors.bring_checkpoints_back(injectors.Testbed(run), made)
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["20"]
        assert made.details["written_meanwhile"] == ["0"]


def test_rays_logs_are_kept_by_node(tmp_path):
    for node in ("0", "1"):
        (tmp_path / "cluster" / node / "session_1" / "logs").mkdir(parents=True)
        (tmp_path / "cluster" / node / "session_1" / "logs" / "raylet.out").write_text(node)
        (tmp_path / "cluster" / node / "session_latest").symlink_to(tmp_path / "cluster" / node / "session_1")
    Cluster(tmp_path / "cluster", None).keep_logs(tmp_path / "kept")
    kept = {path.relative_to(tmp_path / "kept").as_posix(): path.read_text() for path in (tmp_path / "kept").rglob("*.out")}
    assert kept == {"0/session_1/raylet.out": "0", "1/session_1/raylet.out": "1"}


@pytest.mark.parametrize(
    ("kind", "since", "lost"),
    [
        ("slow", ["resize"], True),
        ("slow", [], False),
        ("slow", ["resize", "straggler"], False),
        ("slow", ["process_crash"], False),
        ("stall", ["resize"], False),  # Nothing has to show of it.
    ],
)
def test_a_fault_whose_process_ended_with_a_resize_is_injected_again(kind, since, lost):
    incidents = [incident("resize"), *(incident(name) for name in since)]
    assert chaos.lost_to_a_resize(injection(kind, incidents_before=1), incidents) is lost

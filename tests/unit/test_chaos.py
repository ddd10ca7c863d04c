"""The schedule and the score of `chaos`."""

import random
from collections import Counter

import pytest

from orchestrator import chaos, chaos_faults, run, verify
from orchestrator.chaos_cluster import Cluster
from orchestrator.chaos_faults import KINDS, overrides_for, schedule
from orchestrator.chaos_score import Disturbed, match, score, unfinished_files, what_is_wrong
from orchestrator.chaos_strikes import Fault, Scene, Strike, flipped, pick_file


def strike(kind, at_s, host=1):
    return Strike(kind, host, at_s, at_s, {})


def incident(kind, failed_at_s, host=1, detect=0.1, first_step=0.4):
    recovery = {"detect": detect, "first_step": first_step}
    about = {"kind": kind, "host": host, "step": 40, "resumed_step": 20, "failed_at_s": failed_at_s}
    return {**about, "recovery_s": recovery, "total_s": detect + first_step}


def summary(**changes):
    plain = {"status": "finished", "params_digest": "p", "samples_digest": "s", "incidents": [], "lineage": None}
    return {**plain, "goodput": {"step": 60.0, "start": 40.0}, "wall_s": 100.0, **changes}


def scored(strikes, incidents, reference=None, left=(), not_shipped=None, **changes):
    planned = [Fault(s.kind, s.host, 0.0, 0) for s in strikes]
    run = Disturbed(strikes, summary(incidents=incidents, **changes), left, not_shipped, None)
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


def test_an_incident_belongs_to_the_last_strike_before_its_detection():
    strikes = [strike("process", 100.0), strike("driver", 200.0)]
    before = incident("process_crash", 90.0)
    first, late = incident("process_crash", 100.01), incident("driver_lost", 195.0, host=None, detect=8.0)
    assert match(strikes, [before, first, late]) == ([before], [[first], [late]])


@pytest.mark.parametrize(
    ("kind", "found", "wrong"),
    [
        ("process", [incident("process_crash", 1.0)], None),
        ("process", [], "not noticed"),
        ("process", [incident("host_lost", 1.0)], "named host_lost, expected process_crash"),
        ("process", [incident("process_crash", 1.0, host=0)], "named host 0, struck was host 1"),
        ("driver", [incident("driver_lost", 1.0, host=None)], None),
        ("tracking", [], None),
        ("tracking", [incident("driver_lost", 1.0)], "named driver_lost, expected nothing"),
        ("slow", [], "not noticed"),
        ("slow", [incident("straggler", 1.0)], None),
        ("process", [incident("straggler", 0.5, host=0), incident("process_crash", 1.0)], None),
        ("slow", [incident("hang", 1.0)], "named hang, expected straggler"),
    ],
)
def test_what_is_wrong_with_how_a_strike_was_taken(kind, found, wrong):
    assert what_is_wrong(strike(kind, 0.0), found) == wrong


def test_a_score_passes_only_if_everything_is_as_it_should_be():
    struck, shown = [strike("process", 1.0)], [incident("process_crash", 1.0)]
    assert scored(struck, shown).passed
    assert failed(scored(struck, shown, status="failed")) == ["finished"]
    assert failed(scored(struck, shown, params_digest="q")) == ["final parameters equal to the reference run's, bit for bit"]
    assert failed(scored(struck, shown, summary(samples_digest="t"))) == ["the same samples, each once"]
    assert failed(scored(struck, shown, wall_s=101.0)) == ["the ledger's categories sum to the wall clock"]
    assert failed(scored(struck, shown, left=["process 12: python"])) == ["nothing left behind"]
    assert failed(scored(struck, shown, not_shipped="3 entries are left")) == ["all metrics have arrived: 3 entries are left"]
    assert failed(scored(struck, [])) == ["each was noticed, and named with its host"]


def test_digests_that_are_missing_are_not_equal():
    assert "the same samples, each once" in failed(scored([], [], summary(samples_digest=None), samples_digest=None))


def test_faults_that_did_not_strike_are_missed():
    planned = [Fault("process", 0, 0.0, 0)] * 2
    run = Disturbed([strike("process", 1.0)], summary(incidents=[incident("process_crash", 1.0)]), [], None, None)
    result = score(planned, {}, run, summary())
    assert failed(result) == ["1 of 2 faults struck"]


def test_a_run_that_had_to_be_ended_is_scored_all_the_same():
    cut_short = {"status": "ended by chaos", "incidents": [], "goodput": {}, "wall_s": 0.0}
    run = Disturbed([strike("process", 1.0)], cut_short, [], None, "waited 240 s for the run to be ready for a fault")
    result = score([Fault("process", 0, 0.0, 0)], {}, run, cut_short)
    assert "waited 240 s for the run to be ready for a fault" in failed(result)
    assert "finished" in failed(result)
    assert result.to_dict()["passed"] is False


def test_recovery_is_told_by_kind():
    strikes = [strike("process", 1.0), strike("process", 10.0), strike("tracking", 20.0)]
    result = scored(strikes, [incident("process_crash", 1.0), incident("process_crash", 10.0, first_step=0.9)])
    assert result.recovery_by_kind() == {"process": [pytest.approx(0.5), pytest.approx(1.0)]}
    assert result.to_dict()["median_recovery_s"] == {"process": pytest.approx(0.75)}


@pytest.mark.parametrize(
    ("max_steps", "step", "faults", "pace"), [(None, 0, 3, None), (600, 600, 1, None), (600, 0, 3, 0.06), (600, 590, 3, 0.15)]
)
def test_a_run_is_slowed_down_as_much_as_the_faults_that_are_to_come_need(max_steps, step, faults, pace):
    assert chaos.pace_s(max_steps, step, faults) == (pace if pace is None else pytest.approx(pace))


def test_hosts_are_a_number_or_a_range():
    assert chaos.hosts_overrides(None) == []
    assert chaos.hosts_overrides("3") == ["hosts.count=3"]
    assert chaos.hosts_overrides("2-4") == ["hosts.min=2", "hosts.max=4", "hosts.count=null"]


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


def test_an_unknown_kind_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        chaos.parse(["x.yaml", "--faults", "process,earthquake"])
    assert "--faults earthquake: expected some of process, freeze" in capsys.readouterr().err


def test_damage_changes_one_byte_of_a_file_that_has_some(tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "state" / "data").write_bytes(bytes(100))
    rng = random.Random(0)
    assert pick_file(tmp_path, rng) == tmp_path / "state" / "data"
    damaged = flipped(bytes(100), rng)
    assert len(damaged) == 100
    assert sum(byte != 0 for byte in damaged) == 1


def test_unfinished_files_are_found(tmp_path):
    (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    (tmp_path / "checkpoints" / "40.saving-ab12").mkdir()
    (tmp_path / "launch.json.0a.tmp").touch()
    assert unfinished_files(tmp_path) == ["file checkpoints/40.saving-ab12", "file launch.json.0a.tmp"]


class Shrunk:
    """A run of which three hosts are left."""

    def members(self):
        return dict.fromkeys(range(3))

    def wait(self, condition, what):
        return condition()


def test_a_fault_that_was_dealt_to_a_host_that_is_no_more_strikes_one_that_is(monkeypatch):
    struck = []
    monkeypatch.setitem(chaos_faults.KINDS, "process", chaos_faults.Kind(lambda scene, fault: struck.append(fault.host) or {}))
    made = chaos_faults.strike(Scene(Shrunk()), Fault("process", 3, 0.0, 0))
    assert (struck, made.host) == ([0], 0)


def test_rays_logs_are_kept_by_node(tmp_path):
    for node in ("0", "1"):
        (tmp_path / "cluster" / node / "session_1" / "logs").mkdir(parents=True)
        (tmp_path / "cluster" / node / "session_1" / "logs" / "raylet.out").write_text(node)
        (tmp_path / "cluster" / node / "session_latest").symlink_to(tmp_path / "cluster" / node / "session_1")
    Cluster(tmp_path / "cluster", None).keep_logs(tmp_path / "kept")
    kept = {path.relative_to(tmp_path / "kept").as_posix(): path.read_text() for path in (tmp_path / "kept").rglob("*.out")}
    assert kept == {"0/session_1/raylet.out": "0", "1/session_1/raylet.out": "1"}

"""Faults around the command of a run: its terminal, its reader, and what it must have told when it is run again."""

from __future__ import annotations

import os
import signal
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from gangway.storage.opening import place_of
from gangway.storage.store import Place
from orchestrator.config.job import load
from orchestrator.faultlab.chaos import around_command, injectors
from orchestrator.faultlab.chaos import command as chaos
from orchestrator.faultlab.chaos.faults import KINDS, schedule
from orchestrator.faultlab.chaos.injectors import Fault, Injection
from orchestrator.faultlab.chaos.score import what_is_wrong
from orchestrator.faultlab.testbed.live_run import RunError
from orchestrator.faultlab.testbed.screen import Screen
from orchestrator.run_state import lease
from tests import ROOT
from tests.programs.processes import PATIENCE_S, wait_until
from tests.stores.contract import memory_store

IN_TERMINAL = "trap 'echo asked; exit 3' HUP; tty <&0 > /dev/null && echo in a terminal; while :; do sleep 0.02; done"
TO_READER = "echo one; while :; do echo two; sleep 0.02; done"


def start(screen, script):
    return screen.start(["sh", "-c", script], {**os.environ})


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN], ids=["", "under nohup"])
def test_a_terminal_that_is_closed_asks_its_command_to_end(tmp_path, before):
    own = signal.signal(signal.SIGHUP, before)
    try:
        close_terminal_twice(tmp_path)
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, own)


def close_terminal_twice(tmp_path):
    output = tmp_path / "console.log"
    screen = Screen(output, terminal=True)
    for number in (1, 2):  # a command that is run again has a new one
        process = start(screen, IN_TERMINAL)
        assert wait_until(lambda number=number: output.read_text().count("in a terminal") == number)
        screen.close_terminal()
        assert process.wait(PATIENCE_S) == 3
    assert output.read_text().split("\n") == ["in a terminal", "asked"] * 2 + [""]


def test_a_command_of_chaos_in_the_background_hears_what_stops_it(tmp_path):
    """A script that starts `chaos ... &` has it ignore SIGINT."""
    own = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = start(Screen(tmp_path / "console.log"), "trap 'exit 3' INT; echo one; while :; do sleep 0.02; done")
        assert wait_until(lambda: (tmp_path / "console.log").read_text() == "one\n")
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 3
    finally:
        signal.signal(signal.SIGINT, own)


def test_a_reader_that_goes_away_leaves_the_command_with_a_broken_pipe(tmp_path):
    output = tmp_path / "console.log"
    screen = Screen(output, reader=True)
    process = start(screen, TO_READER)
    assert wait_until(lambda: output.read_text().count("two") > 2)
    screen.stop_reading()
    assert process.wait(PATIENCE_S) == -signal.SIGPIPE
    assert output.read_text().startswith("one\ntwo\n")


def test_without_either_all_comes_into_the_file(tmp_path):
    screen = Screen(tmp_path / "console.log")
    assert start(screen, "echo out; echo err >&2").wait(PATIENCE_S) == 0
    assert (tmp_path / "console.log").read_text() == "out\nerr\n"


class Ended:
    """A run whose command has ended."""

    def __init__(self, status: int, said: str, *saved: int):
        self.process = SimpleNamespace(wait=lambda: status)
        self.said, self.saved, self.started = said, saved, 0

    def console(self) -> str:
        return self.said

    def checkpoints(self):
        return [Path(str(step)) for step in self.saved]

    def start(self) -> None:
        self.started += 1

    def running(self) -> bool:
        return False


def ended(kind, heal, run, **details):
    made = Injection(kind, 0, 0.0, 0.0, {"said_before": 0, **details})
    freed = []
    heal(injectors.Testbed(run, disk=SimpleNamespace(free=lambda: freed.append(1)), max_steps=60), made)
    assert run.started == 1
    assert len(freed) == (kind == "disk_full_at_end")
    return what_is_wrong(made, [])


@pytest.mark.parametrize(
    ("status", "said", "saved", "right"),
    [
        (3, "stopped at 41; saved at 41; run the same command again", (20, 41), True),
        (1, "stopped at 41; saved at 41", (20, 41), False),
        (3, "stopped at 41; saved at 20; 21 steps lost", (20,), False),
        (3, "stopped at 41; saved at 41", (20,), False),
        (3, "", (20, 41), False),
        (0, "", (20, 41), False),
    ],
)
def test_a_command_whose_terminal_is_closed_saves_stops_and_says_so(status, said, saved, right):
    assert (ended("terminal", around_command.go_on, Ended(status, said, *saved)) is None) == right


@pytest.mark.parametrize(
    ("status", "said", "saved", "right"),
    [
        (0, "finished; could not be written: summary.json", (40, 60), True),
        (1, "stopped at 60; saved at 40; 20 steps lost, because no space", (20, 40), True),
        (1, "stopped at 60; nothing is saved; 60 steps lost", (), True),
        (1, "finished", (40, 60), False),
        (0, "", (20, 40), False),
        (3, "stopped at 60; saved at 40", (20, 40), False),
        (1, "stopped at 60; saved at 60", (20, 40), False),
        (1, "", (20, 40), False),
    ],
)
def test_a_command_whose_disk_is_full_as_it_ends_tells_what_is_saved(status, said, saved, right):
    heal = around_command.free_disk_and_go_on
    assert (ended("disk_full_at_end", heal, Ended(status, said, *saved)) is None) == right


def test_a_command_that_still_tries_gets_room_and_goes_on():
    run, freed = Ended(0, ""), []
    run.running = lambda: True
    made = Injection("disk_full_at_end", 0, 0.0, 0.0, {"said_before": 0})
    around_command.free_disk_and_go_on(injectors.Testbed(run, disk=SimpleNamespace(free=lambda: freed.append(1))), made)
    assert (freed, run.started, made.problem) == ([1], 0, None)


def test_what_was_said_before_the_fault_is_not_what_came_of_it():
    said = "stopped at 41; saved at 41\n"
    assert ended("terminal", around_command.go_on, Ended(3, said, 41), said_before=len(said)) is not None


@pytest.mark.parametrize(("salt", "wanted"), [(1, 40), (2, 60)])
def test_the_disk_is_filled_before_the_last_save_or_after_it(salt, wanted):
    waited, filled = [], []

    class Running(Ended):
        def full_speed(self):
            waited.append("at full speed")

        def wait(self, condition, what, patience_s):
            self.saved = (wanted - 20,)
            waited.append(condition())
            self.saved = (wanted,)
            waited.append(condition())

    bed = injectors.Testbed(Running(0, "said"), disk=SimpleNamespace(fill=lambda: filled.append(1)), max_steps=60, save_steps=20)
    details = around_command.fill_disk_at_end(bed, Fault("disk_full_at_end", 0, 0.0, salt))
    assert (waited, filled, details["said_before"]) == (["at full speed", False, True], [1], 4)


def test_what_hides_the_console_comes_late_and_the_end_last_and_once():
    kinds = ["disk_full_at_end", "stdout", "process", "terminal"]
    made = [fault.kind for fault in schedule(kinds, 8, 2, 3, 1.0)]
    assert Counter(made) == {"disk_full_at_end": 1, "stdout": 3, "process": 2, "terminal": 2}
    assert made[-4:] == ["stdout", "stdout", "stdout", "disk_full_at_end"]
    assert all(KINDS[kind].last == 0 for kind in made[:4])


def test_a_run_that_ends_nobody_knows_where_has_no_fault_at_its_end():
    overrides = ["max_num_steps=null", "max_num_data_epochs=1", "optimizer.schedule.name=constant"]
    why = chaos.why_not("disk_full_at_end", load(str(ROOT / "configs" / "tiny.yaml"), overrides))
    assert why == "it comes as the run ends, and nobody knows where that is; set max_num_steps"


class Command:
    """A run that trains until it is stopped, and whose next launch ends with `status` and `said`."""

    def __init__(self, run_dir: Path, status: int, said: str):
        self.run_dir, self.orders, self.output = place_of(run_dir), run_dir.parent / "faults", "console"
        self.status, self.said, self.console_text, self.starts = status, said, "", []
        self.process = SimpleNamespace(send_signal=lambda number: None, wait=lambda timeout_s: self.end())
        (run_dir / "checkpoints").mkdir(parents=True)
        self.orders.mkdir(exist_ok=True)
        lease.LEASE_KIND.write(self.run_dir / "lease.json", {**asdict(HOLDER), "released": True})

    def end(self):
        """First it is stopped; then it ends as it is to."""
        return self.status if self.starts else 3

    def start(self, *overrides, **env):
        self.starts.append((overrides, env))
        self.console_text += self.said

    def console(self):
        return self.console_text

    def wait(self, condition, what, patience_s=0.0):
        return condition()

    def now_s(self):
        return 0.0

    def tree(self):
        return []


HOLDER = lease.Holder(
    driver_term=1, launch_id="a", hostname="b", machine="c", pid=1, since_s=0.0, renewed_at_s=0.0, renewed_s=0.0
)
WAITS = "which has not released it: ... stopped on request before the run went on"


@pytest.mark.parametrize(
    ("inject", "status", "said", "right"),
    [
        (around_command.stop_a_wait, 3, WAITS, True),
        (around_command.stop_a_wait, 130, WAITS, False),
        (around_command.stop_a_wait, 3, "stopped at 41; saved at 41", False),
        (around_command.use_jax_early, 2, "JAX's devices are used before ... (early.py, line 3", True),
        (around_command.use_jax_early, 2, "out of memory", False),
        (around_command.use_jax_early, 1, "early.py", False),
    ],
)
def test_a_launch_that_ends_as_it_must_not_is_told(tmp_path, monkeypatch, inject, status, said, right):
    monkeypatch.setattr(around_command.time, "sleep", lambda seconds: None)
    run = Command(tmp_path / "tiny", status, said)
    with nullcontext() if right else pytest.raises(RunError):
        assert inject(injectors.Testbed(run), Fault("", 0, 0.0, 3))["status"] == status
    if inject is around_command.use_jax_early:
        (((override,), env),) = run.starts
        assert override == "trainer=early:Scaled"
        assert not Path(env["PYTHONPATH"].split(os.pathsep)[0]).exists()
    else:
        assert lease.holder_of(str(tmp_path / "tiny")).machine == "another"


@pytest.mark.parametrize(
    ("status", "said", "right"), [(2, "new-a.txt a.txt", True), (2, "b", False), (0, "new-a.txt a.txt", False)]
)
def test_data_are_changed_in_each_way_and_are_as_before_then(tmp_path, status, said, right):
    (data := tmp_path / "data").mkdir()
    (data / "a.txt").write_text("some words")
    ways = set()
    for salt in range(40):
        run = Command(tmp_path / f"{salt}" / "tiny", status, said)
        try:
            ways.add(around_command.change_data(injectors.Testbed(run, data=data), Fault("", 0, 0.0, salt))["how"])
        except RunError:
            assert not right
        assert [(file.name, file.read_text()) for file in data.iterdir()] == [("a.txt", "some words")]
    assert ways == ({"longer", "shorter", "a letter", "gone", "new"} if right else set())


@pytest.mark.parametrize("in_bucket", [False, True])
def test_a_run_that_is_moved_comes_back_whole(tmp_path, in_bucket):
    run, seen = Command(tmp_path / "tiny", 3, ""), []
    if in_bucket:
        run.run_dir = Place(memory_store(), "runs/tiny")
        for name in ("launch.json", "row/1"):
            (run.run_dir / name).put(b"one")
    before = run.run_dir
    whole = [entry.name for entry in before.list()]
    run.saved_after = lambda at_s: not seen.append((run.run_dir, [entry.name for entry in before.list()]))
    around_command.move_run(injectors.Testbed(run), Fault("", 0, 0.0, 0))
    ((there, left),) = seen
    assert there.url == f"{before.parent.url}/tiny-chaos-moved/tiny"
    assert left == []
    assert run.starts == [((f"storage={there.parent.url}",), {})]
    assert run.run_dir == before
    assert [entry.name for entry in before.list()] == whole != []
    assert not there.parent.is_dir()
    run.saved_after = lambda at_s: False
    with pytest.raises(RunError, match="the command has ended"):
        around_command.move_run(injectors.Testbed(run), Fault("", 0, 0.0, 0))

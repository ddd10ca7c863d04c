"""Kills parts of a real local run at random moments and scores what comes of it: `python -m orchestrator.chaos CONFIG ...`.

First an undisturbed run of the same configuration, then one with the faults. The score: it finished, its final parameters and the
samples it trained on are those of the undisturbed run, bit for bit, and how long each recovery took. Ends with a table and a
JSON file.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from orchestrator import storage
from orchestrator.config import JobConfig, load
from orchestrator.launch import STATE
from orchestrator.summary import SUMMARY

FAULTS = ("process", "agent", "driver")
LOG_OF_PROCESS = re.compile(r"/host-(\d+)/process-\d+-(\d+)\.log$")
WAIT_LIMIT_S = 240.0
"""For the run to get to where the next fault may strike."""
QUIET_S = 0.5
"""A standby that used no CPU for so long is warm: it waits for orders."""


@dataclass(frozen=True)
class Fault:
    kind: str
    host: int
    delay_s: float
    """After the run is ready for it: where in its steps it strikes."""


@dataclass
class Score:
    """`strikes` are the faults that really struck; `incidents` are the run's own records of what followed."""

    finished: bool
    same_parameters: bool
    same_samples: bool
    planned: int
    strikes: list[dict[str, Any]] = field(default_factory=list)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)
    goodput: dict[str, float] = field(default_factory=dict)
    wall_s: float = 0.0

    @property
    def passed(self) -> bool:
        equal = self.same_parameters and self.same_samples
        return self.finished and equal and len(self.strikes) == self.planned and not self.left_behind


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    config = load(arguments.config, arguments.overrides)
    hosts = config.hosts.count or 1
    faults = schedule(arguments.faults.split(","), arguments.count, hosts, arguments.seed, arguments.spread_s)
    score = play(arguments.config, arguments.overrides, config, faults)
    path = storage.join(config.run_dir, "chaos.json")
    storage.write_json(path, asdict(score))
    show(score, Console())
    print(f"written to {path}")
    return 0 if score.passed else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.chaos", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--faults", default=",".join(FAULTS), help=f"kinds, separated by commas: {', '.join(FAULTS)}")
    parser.add_argument("--count", type=int, default=3, help="how many faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spread-s", type=float, default=1.0, help="faults strike up to so many seconds after the run is ready")
    arguments = parser.parse_args(argv)
    if unknown := sorted(set(arguments.faults.split(",")) - set(FAULTS)):
        parser.error(f"--faults {', '.join(unknown)}: expected some of {', '.join(FAULTS)}")
    return arguments


def schedule(kinds: Sequence[str], count: int, hosts: int, seed: int, spread_s: float) -> list[Fault]:
    """The same faults for the same seed: each kind in turn, on random hosts, at random delays."""
    rng = random.Random(seed)
    return [Fault(kinds[i % len(kinds)], rng.randrange(hosts), rng.uniform(0, spread_s)) for i in range(count)]


def play(config_path: str, overrides: Sequence[str], config: JobConfig, faults: Sequence[Fault]) -> Score:
    name = config.training.name
    supervise = ["driver.supervise=true"] if any(fault.kind == "driver" for fault in faults) else []
    reference = Run(config_path, [*overrides, f"name={name}-reference"], f"{config.run_dir}-reference")
    reference.finish()
    run = Run(config_path, [*overrides, *supervise], config.run_dir)
    strikes: list[dict[str, Any]] = []
    try:
        for fault in faults:
            if not run.ready(len(strikes)):
                break
            time.sleep(fault.delay_s)
            strikes.append({**asdict(fault), "at_s": time.time(), "pid": run.strike(fault)})
        run.finish()
    finally:
        left = run.clean_up()
    expected, got = reference.summary(), run.summary()
    return Score(
        finished=got["status"] == "finished" and expected["status"] == "finished",
        same_parameters=got["params_digest"] == expected["params_digest"],
        same_samples=got["samples_digest"] == expected["samples_digest"],
        planned=len(faults),
        strikes=strikes,
        incidents=got["incidents"],
        left_behind=left,
        goodput=got["goodput"],
        wall_s=got["wall_s"],
    )


class Run:
    """A job in a process of its own, seen from outside: its process tree and the files that it writes."""

    def __init__(self, config_path: str, overrides: Sequence[str], run_dir: str):
        if storage.exists(storage.join(run_dir, STATE)):
            raise SystemExit(
                f"{run_dir} holds a run already: chaos needs names that are free; remove it, or set name= or storage="
            )
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.output = self.run_dir / "console.log"
        command = [sys.executable, "-m", "orchestrator.run", config_path, *overrides]
        with self.output.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.seen: dict[int, psutil.Process] = {}

    def ready(self, strikes: int) -> bool:
        """Waits until all earlier faults are overcome, a new checkpoint is there and the standbys are warm. False if it ended."""
        state = self._launch()
        checkpoint = state["checkpoint_step"] if state else None

        def recovered() -> bool:
            now = self._launch()
            if now is None or len(now["incidents"]) < strikes or now["checkpoint_step"] is None:
                return False
            over = all(incident["resumed_step"] is not None for incident in now["incidents"])
            return over and (strikes == 0 or now["checkpoint_step"] != checkpoint) and self._standbys_are_warm()

        return self._wait(recovered)

    def strike(self, fault: Fault) -> int:
        """SIGKILL; returns whose process it was."""
        victim = {"process": self._training, "agent": self._agent, "driver": lambda host: self._named("RayTrainWorker")[0]}
        process = victim[fault.kind](fault.host)
        os.kill(process.pid, signal.SIGKILL)
        return process.pid

    def finish(self) -> None:
        while self.process.poll() is None:
            self._tree()
            time.sleep(0.2)

    def summary(self) -> dict[str, Any]:
        summary = storage.read_json(self.run_dir / SUMMARY)
        if summary is None:
            raise SystemExit(f"the run left no summary; it printed:\n{self.output.read_text()[-4000:]}")
        return summary

    def clean_up(self) -> list[str]:
        """Ends the run if it still goes on; returns the processes of it that were left behind, and ends them too."""
        if self.process.poll() is None:
            self._tree()
            self.process.kill()
            self.process.wait()
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=20)
        left = [f"{p.pid} {_command(p)[:80]}" for p in alive]
        for process in alive:
            process.kill()
        return left

    def _wait(self, condition: Callable[[], bool]) -> bool:
        deadline_s = time.monotonic() + WAIT_LIMIT_S
        while self.process.poll() is None:
            if condition():
                return True
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{self.run_dir.name} was not ready for a fault after {WAIT_LIMIT_S:.0f} s; see {self.output}")
            time.sleep(0.05)
        return False

    def _launch(self) -> dict[str, Any] | None:
        return storage.read_json(self.run_dir / STATE)

    def _tree(self) -> list[psutil.Process]:
        try:
            tree = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.seen.update({process.pid: process for process in tree})
        return tree

    def _named(self, name: str) -> list[psutil.Process]:
        return [process for process in self._tree() if name in _command(process)]

    def _trainings(self) -> dict[int, list[psutil.Process]]:
        """By host: the training process, then its standby, as their log files are numbered."""
        found: dict[int, list[tuple[int, psutil.Process]]] = {}
        for process in self._named("trainers.worker"):
            if place := _log_of(process):
                found.setdefault(place[0], []).append((place[1], process))
        return {host: [process for _, process in sorted(numbered, key=lambda n: n[0])] for host, numbered in found.items()}

    def _training(self, host: int) -> psutil.Process:
        return self._trainings()[host][0]

    def _agent(self, host: int) -> psutil.Process:
        agent = self._training(host).parent()
        assert agent is not None
        return agent

    def _standbys_are_warm(self) -> bool:
        pairs = self._trainings()
        if not pairs or any(len(processes) < 2 for processes in pairs.values()):
            return False
        before = [_cpu_s(processes[1]) for processes in pairs.values()]
        time.sleep(QUIET_S)
        return before == [_cpu_s(processes[1]) for processes in pairs.values()]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def _cpu_s(process: psutil.Process) -> float | None:
    try:
        return sum(process.cpu_times()[:2])
    except psutil.NoSuchProcess:
        return None


def _log_of(process: psutil.Process) -> tuple[int, int] | None:
    """(host, number) of a training process, from where its output goes; None for what is not one, or not any more."""
    try:
        match = LOG_OF_PROCESS.search(os.readlink(f"/proc/{process.pid}/fd/1"))
    except OSError:
        return None
    # The guard of a training process shares its command line, but has closed its output.
    return (int(match.group(1)), int(match.group(2))) if match else None


def show(score: Score, console: Console) -> None:
    table = Table(title="faults", title_justify="left", box=None, pad_edge=False)
    for name in ("fault", "host", "at step", "went on from", "recovery s", "phases s"):
        table.add_column(name, justify="left" if name in ("fault", "phases s") else "right")
    for strike, incident in zip(score.strikes, score.incidents, strict=False):
        phases = " ".join(f"{name} {seconds:.2f}" for name, seconds in incident["recovery_s"].items())
        table.add_row(
            strike["kind"],
            str(strike["host"]),
            str(incident["step"]),
            str(incident["resumed_step"]),
            f"{incident['total_s']:.2f}",
            phases,
        )
    console.print(table)
    if score.incidents:
        console.print(f"median recovery {statistics.median(i['total_s'] for i in score.incidents):.2f} s")
    for name, good in (
        ("finished", score.finished),
        ("final parameters equal to the undisturbed run's, bit for bit", score.same_parameters),
        ("the same samples, each once", score.same_samples),
        (f"{len(score.strikes)} of {score.planned} faults struck", len(score.strikes) == score.planned),
        ("nothing left behind", not score.left_behind),
    ):
        console.print(f"  {'✓' if good else '✗'} {name}", style="green" if good else "red")


if __name__ == "__main__":
    sys.exit(main())

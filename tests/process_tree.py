"""CPU-seconds of a process and of all that it has started, by kind of process. What has ended counts too.

The kernel adds the time of an ended child to its parent where the parent collects it. Ray's raylet does not: the time of its
workers would be lost. So the tree is looked at twice a second while there is one; an ended process counts as it was seen last."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
EVERY_S = 0.5
SPAWNS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")
"""Events of Python's audit that come before a process is started."""
OWN = "own"
OTHERS = "commands"
KINDS = (
    # The first that is found in a command line says what the process is.
    ("training", ("trainers.worker", "fork_server", "trainers.planning")),
    ("drivers", ("orchestrator.run", "orchestrator.commands", "gangway run")),
    ("mlflow", ("mlflow", "orchestrator.tracking")),
    ("ray", ("raylet/raylet", "gcs_server", "/ray/dashboard/", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "/ray/_private/")),
    ("agents", ("ray::", "default_worker.py")),
    ("stores", ("moto", "weed", "fake_gcs")),
)


@dataclass
class Process:
    start: int
    """Ticks after the machine's start. With the id it names a process for ever."""
    parent: Process | None
    kind: str = OTHERS
    own_s: float = 0.0
    collected_s: float = 0.0
    """Seconds of ended children that this process has waited for, and of theirs."""
    ended: Counter[str] = field(default_factory=Counter)
    """Seconds of ended children by kind, and of theirs, as they were seen last."""
    known_s: float = 0.0
    """Which of the collected seconds those of ended children are."""
    children: dict[int, Process] = field(default_factory=dict)
    alive: bool = True


@dataclass(frozen=True)
class Stat:
    parent: int
    start: int
    own_s: float
    collected_s: float


class ProcessTree:
    """One thread at a time may read it; a lock sees to that."""

    def __init__(self, root: int | None = None):
        self._pid = root or os.getpid()
        stat = stats_of(self._pid)
        self._root = Process(stat.start, None, OWN, known_s=stat.collected_s)  # from now on
        self._alive: dict[int, Process] = {self._pid: self._root}
        self._lock = threading.Lock()

    def read(self) -> Counter[str]:
        """Returns the seconds until now by kind: `own` are those of the root. They never fall."""
        with self._lock:
            self._look(dict(all_stats()))
            return self._seconds_of(self._root)

    def has_others(self) -> bool:
        return len(self._alive) > 1

    def _look(self, stats: dict[int, Stat]) -> None:
        for pid, process in list(self._alive.items()):
            if pid not in stats or stats[pid].start != process.start:
                process.alive = False
                del self._alive[pid]
        for pid in sorted(stats, key=lambda pid: stats[pid].start):  # a parent is older than its child
            stat = stats[pid]
            if pid not in self._alive and stat.parent in self._alive:
                parent = self._alive[stat.parent]
                self._alive[pid] = parent.children[pid] = Process(stat.start, parent)
        for pid, process in self._alive.items():
            process.own_s, process.collected_s = stats[pid].own_s, stats[pid].collected_s
            # One that has ended, and is not collected yet, has no command line.
            if process is not self._root and (command := command_line(pid)):
                process.kind = kind_of(command)
        _fold(self._root)

    def _seconds_of(self, process: Process) -> Counter[str]:
        seconds = Counter({process.kind: process.own_s})
        seconds.update(process.ended)
        for child in process.children.values():
            seconds.update(self._seconds_of(child))
        seconds[OTHERS] += unseen_s(process)
        return seconds


def unseen_s(process: Process) -> float:
    """Returns the seconds of what has come and gone between two looks: its parent alone knows them."""
    left = sum(child.own_s + child.collected_s for child in process.children.values() if not child.alive)
    return max(0.0, process.collected_s - process.known_s - left)


def _fold(process: Process) -> None:
    """Adds the children that have ended, and left nothing running, to their parent."""
    for pid, child in list(process.children.items()):
        _fold(child)
        if not child.alive and not child.children:
            process.ended[child.kind] += child.own_s
            process.ended.update(child.ended)
            process.ended[OTHERS] += unseen_s(child)
            process.known_s += child.own_s + child.collected_s
            del process.children[pid]


def all_stats() -> Iterator[tuple[int, Stat]]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                yield int(name), stats_of(int(name))
            except (FileNotFoundError, ProcessLookupError):
                continue


def stats_of(pid: int) -> Stat:
    """See proc(5): the name of the program may have spaces and brackets."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    user, system, user_of_children, system_of_children = (int(each) / TICKS_PER_S for each in fields[11:15])
    return Stat(int(fields[1]), int(fields[19]), user + system, user_of_children + system_of_children)


def command_line(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(4096).replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def kind_of(command: str) -> str:
    return next((kind for kind, words in KINDS if any(word in command for word in words)), OTHERS)


class Meter:
    """The seconds of this process's tree. It costs nothing while this process has started none."""

    def __init__(self) -> None:
        self._tree = ProcessTree()
        self._wanted = threading.Event()
        self._last: Counter[str] = Counter()
        self._of_children = os.times()[2:4]
        sys.addaudithook(self._notice)
        threading.Thread(target=self._look_again, name="ledger", daemon=True).start()

    def read(self) -> Counter[str]:
        of_children = os.times()[2:4]
        if self._wanted.is_set() or of_children != self._of_children:
            self._of_children = of_children
            self._last = self._tree.read()
            if not self._tree.has_others():
                self._wanted.clear()
        return Counter({**self._last, OWN: time.process_time()})  # of a finer clock than the kernel's ticks

    def _notice(self, event: str, _: object) -> None:
        if event in SPAWNS:
            self._wanted.set()

    def _look_again(self) -> None:
        while True:
            self._wanted.wait()
            threading.Event().wait(EVERY_S)
            self._tree.read()

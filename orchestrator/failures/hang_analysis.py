"""Finds the host that a hanging gang waits for, and its line, from the Python stacks of all hosts. Pure.

A gang hangs as a whole: in the end every host waits for the one that does not come. So the host to name is the one that does not
wait for others, and not the one whose limit passed first. Stacks are texts of `py-spy dump --full-filenames` or of faulthandler.
(With short file names, a library in a folder without `__init__.py` looks like a user's file.)
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SAVE = "save"
"""The phase whose work is done in other threads than the main thread."""
STOPPED, IN_SYSTEM_CALL = ("T", "t"), "D"
"""Letters of kernel states. Stopped: no line of the program runs. In a system call: the main thread waits in the kernel."""

WAITING = {
    "wait_for_device trainers/parallel/platform.py": "the device",
    "__call__ trainers/runtime/executables.py": "the device",
    "__call__ jax/_src/interpreters/pxla.py": "the device",
    "block_until_ready jax/_src/api.py": "the device",
    "block_until_ready jax/_src/array.py": "the device",
    "_value jax/_src/array.py": "the device",
    "__array__ jax/_src/array.py": "the device",
    "_get trainers/runtime/multihost.py": "agreement",
    "gather trainers/runtime/multihost.py": "agreement",
    "_receive trainers/checkpoint/commit.py": "the others' parts of a checkpoint",
    "wait_for_listener trainers/runtime/distributed.py": "joining",
    "initialize jax/_src/distributed.py": "joining",
    "wait_at_barrier signaling_client.py": "a barrier",
    "sync_global_processes multihost.py": "a barrier",
}
"""The innermost functions in which a host waits for other hosts, and what it waits on. On the device it waits in a collective.
A test checks that every function of this table exists."""

PACKAGES = r"(?:gangway|trainers|cluster|orchestrator)/"
LIBRARY = re.compile(
    rf"-packages/(?!{PACKAGES})|/lib(64)?/python3[.\d]*/(?!(site|dist)-packages/)|^<|^(jax|jaxlib|numpy|orbax|tensorstore|etils|flax|optax)/"
)
"""Our own code is none where it is installed."""
STANDARD = re.compile(r"(^|/)(threading|selectors|queue|socket|subprocess|ssl)\.py$|(^|/)(asyncio|concurrent/futures)/|^<")
CHECKPOINTING = re.compile(r"(^|/)(orbax|tensorstore)/|trainers/checkpoint/")
CHECKPOINT_THREAD = "checkpoint"
"""The prefix of the names of our threads that write a checkpoint."""
OURS = re.compile(rf"(^|/){PACKAGES}")
LOOP = re.compile(r"(^|/)trainers/(loop|trainer)/")
"""What a user's `train` calls: whoever is in it is no longer in the user's code."""
LAUNCHER = "trainers/worker.py"
LOADER = "trainers/data/loader.py"
"""Where the loop waits for a batch, which other threads make."""
WAITS_FOR_OTHERS = ("trainers/runtime/multihost.py", "trainers/parallel/platform.py")
"""Frames of these files are skipped: a person wants to see their caller."""

PY_SPY_THREAD = re.compile(r'Thread \w+ \([^)]*\)(?:: "(?P<name>.*)")?$')
PY_SPY_FRAME = re.compile(r"    (?P<function>.+) \((?P<file>.+):(?P<line>\d+)\)$")
OWN_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
OWN_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
PACKAGE_STARTS = (r"-packages/", r"/lib(?:64)?/python3[.\d]*/", rf"^.*/(?={PACKAGES})")
SHOWN_FRAMES = 12


@dataclass(frozen=True)
class Frame:
    function: str
    """Its name without that of its class."""
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({short_name(self.file)}:{self.line})"


@dataclass(frozen=True)
class Thread:
    name: str
    frames: tuple[Frame, ...]
    """Innermost first."""

    @property
    def is_main(self) -> bool:
        return self.name == "MainThread" or any(frame.function == "_run_module_as_main" for frame in self.frames)

    @property
    def is_idle(self) -> bool:
        """Whether it is a thread of a pool without work."""
        return all(STANDARD.search(frame.file) for frame in self.frames)

    @property
    def is_parked(self) -> bool:
        """Whether it waits for another thread, or for an answer from outside the process."""
        return bool(self.frames) and STANDARD.search(self.frames[0].file) is not None

    @property
    def is_checkpointing(self) -> bool:
        if self.name:
            return self.name.startswith(CHECKPOINT_THREAD) or any(CHECKPOINTING.search(frame.file) for frame in self.frames)
        return not any(frame.file.endswith(LAUNCHER) for frame in self.frames)  # faulthandler knows no names

    @property
    def waits_on(self) -> str | None:
        """What it waits on if it waits for other hosts; None if it does not."""
        if not self.frames:
            return None
        frame = self.frames[0]
        names = (f"{frame.function} {part}" for part in _endings(frame.file))
        return next((WAITING[name] for name in names if name in WAITING), None)

    @property
    def line(self) -> str | None:
        """The innermost line of the user's or our own code. Frames of libraries, waits and the launcher are skipped if others
        are left."""
        frames = [frame for frame in self.frames if not _is_library(frame)]
        if not frames:
            return str(self.frames[0]) if self.frames else None
        for is_noise in (_is_wait, _is_launcher):
            frames = [frame for frame in frames if not is_noise(frame)] or frames
        return str(frames[0])

    @property
    def user_line(self) -> str | None:
        """The innermost line of the user's own code; None if it is in none."""
        within = itertools.takewhile(lambda frame: not LOOP.search(frame.file), self.frames)
        return next((str(frame) for frame in within if not _is_library(frame) and not OURS.search(frame.file)), None)

    @property
    def told(self) -> str | None:
        """`line`, with the line of a library that it waits in, and with the user's line if `line` is ours."""
        if self.line is None:
            return None
        inner = self.frames[: [str(frame) for frame in self.frames].index(self.line)]
        inside = next((f", in {frame}" for frame in inner if _is_library(frame) and not STANDARD.search(frame.file)), "")
        return self.line + inside + ("" if self.user_line in (None, self.line) else f", called by {self.user_line}")


@dataclass(frozen=True, kw_only=True)
class HostStacks:
    """The stacks and the state of one host of a gang that hangs."""

    host: int
    text: str | None = None
    state: str | None = None
    """The state of its process in the kernel, such as `T (stopped)`."""
    batch_index: int | None = None


@dataclass(frozen=True)
class Blame:
    host: int | None
    """None if no single host could be identified."""
    line: str | None
    """The line of that host; without a host, the line at which all hosts are, if it is one."""
    user_line: str | None
    """The user's line of that host; without a host that of all hosts, if they wait for no other host there."""
    why: str
    groups: list[dict[str, Any]]
    """Hosts with the same stack: `hosts`, `line`, `waits_on`, `frames`; JSON-able."""


@dataclass(frozen=True)
class Position:
    """The thread that shows where one host is."""

    thread: Thread
    waits_on: str | None


def parse(text: str | None) -> list[Thread]:
    """Returns the threads of a dump; none for a text that is no dump."""
    threads: list[tuple[str, list[Frame]]] = []
    for row in (text or "").splitlines():
        head = PY_SPY_THREAD.match(row) or OWN_THREAD.match(row)
        frame = PY_SPY_FRAME.match(row) or OWN_FRAME.match(row)
        if head:
            threads.append((head.groupdict().get("name") or "", []))
        elif frame and threads:
            function = frame["function"].rsplit(".", 1)[-1]  # without the class, which faulthandler does not write
            threads[-1][1].append(Frame(function, frame["file"], int(frame["line"])))
    return [Thread(name, tuple(frames)) for name, frames in threads]


def short_name(file: str) -> str:
    """Returns a file name as people know it: `trainers/loop/train_loop.py`, `jax/_src/api.py`, `my_callbacks.py`."""
    if not file.startswith("/"):
        return file
    matches = (re.search(start + "(.+)$", file) for start in PACKAGE_STARTS)
    return next((match[1] for match in matches if match), file.rsplit("/", 1)[-1])


def position_of(text: str | None, phase: str) -> Position | None:
    """Returns where a host is in `phase`; None if its stacks do not show it."""
    threads = [thread for thread in parse(text) if thread.frames and not thread.is_idle]
    main = next((thread for thread in threads if thread.is_main), None)
    candidates = _saving_threads(threads, main, phase) or _reading_threads(threads, main) or ([main] if main else [])
    if not candidates:
        return None
    thread = candidates[0] if candidates == [main] else _most_telling(candidates, main)
    return Position(thread, thread.waits_on)


def _most_telling(threads: Sequence[Thread], main: Thread | None) -> Thread:
    """Returns the thread of a save that shows best why the save does not end."""
    for thread in threads:
        if not thread.is_parked and thread.waits_on is None:  # it is at work
            return thread
    for thread in threads:
        if thread.waits_on is not None:
            return thread
    # All are parked: the storage does not answer. The thread with our code shows more than a library's thread.
    for thread in threads:
        if thread is not main and _innermost_own_file(thread):
            return thread
    return threads[0]


def blame(hosts: Sequence[HostStacks], phase: str) -> Blame:
    """Names the host that the others wait for in `phase`: by kernel state, by stack, by progress, in that order."""
    positions: dict[int, Position] = {}
    for stacks in hosts:
        if (position := position_of(stacks.text, phase)) is not None:
            positions[stacks.host] = position
    host, why = _blamed_host(hosts, positions)
    blamed = [positions[host]] if host in positions else list(positions.values()) if host is None else []
    lines = {position.thread.told for position in blamed}
    user_lines = {position.thread.user_line if host is not None or position.waits_on is None else None for position in blamed}
    line, user_line = (found.pop() if len(found) == 1 else None for found in (lines, user_lines))
    return Blame(host, line, user_line, why, _groups(positions))


def _blamed_host(hosts: Sequence[HostStacks], positions: Mapping[int, Position]) -> tuple[int | None, str]:
    """Returns the host to blame and the reason; (None, reason) if no single host can be identified."""
    # First: a stopped process explains the hang, whatever its stacks say.
    stopped = {stacks.host: stacks.state for stacks in hosts if stacks.state and stacks.state[0] in STOPPED}
    if stopped:
        first, *others = sorted(stopped)
        like = f", like {_hosts(others)}" if others else ""
        return first, f"its process is frozen, in state {stopped[first]}{like}"
    busy = _busy_hosts(hosts, positions)
    if len(busy) == 1:
        return min(busy), "it waits for no other host"
    # Only hosts with a text: without one, nothing was read, which says nothing about the host.
    without_stack = [stacks.host for stacks in hosts if stacks.text and stacks.host not in positions]
    if not busy and len(without_stack) == 1 and positions:
        return without_stack[0], "it alone shows no stack"
    # If all hosts are busy, or none is, being busy does not tell them apart.
    suspects = busy if 0 < len(busy) < len(positions) else set(positions)
    batches = {s.host: s.batch_index for s in hosts if s.host in suspects and s.batch_index is not None}
    host, why = _odd_one_out({host: positions[host] for host in suspects}, batches)
    if host is None and suspects != set(positions):
        return min(suspects), f"{_hosts(suspects)} wait for no other host"
    return host, why or "could not identify one host"


def _busy_hosts(hosts: Sequence[HostStacks], positions: Mapping[int, Position]) -> set[int]:
    """Returns the hosts that do not wait for other hosts."""
    busy = {host for host, position in positions.items() if position.waits_on is None}
    # Whatever its stack says: a process in such a system call waits for a disk or a device of its machine.
    busy |= {s.host for s in hosts if s.state and s.state[0] == IN_SYSTEM_CALL and s.host in positions}
    return busy


def _saving_threads(threads: Sequence[Thread], main: Thread | None, phase: str) -> list[Thread]:
    """Returns the threads that write a checkpoint, if the host is busy with a save or waits for one."""
    in_main = main is not None and _innermost_own_file(main).endswith("trainers/checkpoint/manager.py")
    if phase != SAVE and not in_main:
        return []
    others = [thread for thread in threads if thread is not main and thread.is_checkpointing]
    return [main, *others] if main is not None and in_main else others


def _reading_threads(threads: Sequence[Thread], main: Thread | None) -> list[Thread]:
    """Returns the thread that reads the user's data, if the loop waits for a batch."""
    waits = main is not None and main.is_parked and _innermost_own_file(main).endswith(LOADER)
    return [thread for thread in threads if thread is not main and thread.user_line][:1] if waits else []


def _innermost_own_file(thread: Thread) -> str:
    """Returns the file of the innermost frame that is not a library's; empty if there is none."""
    return next((frame.file for frame in thread.frames if not _is_library(frame)), "")


def _is_library(frame: Frame) -> bool:
    return LIBRARY.search(frame.file) is not None


def _is_wait(frame: Frame) -> bool:
    return frame.file.endswith(WAITS_FOR_OTHERS)


def _is_launcher(frame: Frame) -> bool:
    return frame.file.endswith(LAUNCHER)


def _odd_one_out(positions: Mapping[int, Position], batches: Mapping[int, int]) -> tuple[int | None, str]:
    """Returns the host that is alone at its line, else the host that is furthest behind; with the reason."""
    lines = {host: position.waits_on or position.thread.line for host, position in positions.items()}
    count = Counter(lines.values())
    alone = [host for host, line in lines.items() if count[line] == 1]
    # A single host is not odd. Of two, both or none is alone at its line.
    if len(alone) == 1 and len(positions) > 1:
        return alone[0], "it alone stands there"
    last = min(batches.values(), default=0)
    behind = [host for host, batch in batches.items() if batch == last]
    if len(behind) == 1 and len(batches) > 1:
        ahead = sorted(set(batches.values()) - {last})
        return behind[0], f"it is furthest behind: at batch {last}, the others at {_numbers(ahead)}"
    return None, ""


def _groups(positions: Mapping[int, Position]) -> list[dict[str, Any]]:
    """Returns the hosts with equal stacks together, for the evidence."""
    grouped: dict[tuple[Frame, ...], list[int]] = {}
    for host, position in sorted(positions.items()):
        # By short names: the project may lie in different folders on different machines.
        stack = tuple(Frame(f.function, short_name(f.file), f.line) for f in position.thread.frames)
        grouped.setdefault(stack, []).append(host)
    return [
        {
            "hosts": hosts,
            "line": positions[hosts[0]].thread.line,
            "waits_on": positions[hosts[0]].waits_on,
            "frames": [str(frame) for frame in frames[:SHOWN_FRAMES]],
        }
        for frames, hosts in grouped.items()
    ]


def _endings(file: str) -> list[str]:
    """Returns `a/b/c.py`, `b/c.py`, `c.py` for `a/b/c.py`."""
    parts = file.split("/")
    return ["/".join(parts[n:]) for n in range(len(parts))]


def _hosts(hosts: Iterable[int]) -> str:
    shown = sorted(hosts)
    return f"host {shown[0]}" if len(shown) == 1 else f"hosts {_numbers(shown)}"


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))

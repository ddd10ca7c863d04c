"""Which host holds the others up, and at which line: read from the Python stacks of all hosts of a gang that hangs. Pure.

A gang hangs as one: every host waits in the end for the one that does not come. So the host to name is the one that does not
wait for others, and not the one that was found out first. Stacks are texts as `py-spy dump --full-filenames` (short names will
do, but then a library in a folder without `__init__.py` is not told from a user's file) or faulthandler write them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SAVE = "save"
"""The phase whose work is done beside the main thread."""
STOPPED, IN_SYSTEM_CALL = ("T", "t"), "D"
"""Letters of kernel states: no line of any program runs; the main thread is in a system call that does not return."""

WAITING = {
    "wait_for_device trainers/runtime/device.py": "the device",
    "__call__ trainers/runtime/executables.py": "the device",
    "__call__ jax/_src/interpreters/pxla.py": "the device",
    "block_until_ready jax/_src/api.py": "the device",
    "block_until_ready jax/_src/array.py": "the device",
    "_value jax/_src/array.py": "the device",
    "__array__ jax/_src/array.py": "the device",
    "_get trainers/runtime/multihost.py": "agreement",
    "gather trainers/runtime/multihost.py": "agreement",
    "_hear trainers/checkpoint/commit.py": "the others' parts of a checkpoint",
    "wait_for_listener trainers/runtime/distributed.py": "joining",
    "initialize jax/_src/distributed.py": "joining",
    "wait_at_barrier signaling_client.py": "a barrier",
    "sync_global_processes multihost.py": "a barrier",
}
"""Innermost functions in which a host waits for other hosts (in the device it waits inside a collective), and on what."""

LIBRARY = re.compile(r"-packages/|/lib(64)?/python3[.\d]*/|^<|^(jax|jaxlib|numpy|orbax|tensorstore|etils|flax|optax)/")
STANDARD = re.compile(r"(^|/)(threading|selectors|queue|socket|subprocess|ssl)\.py$|(^|/)(asyncio|concurrent/futures)/|^<")
CHECKPOINTING = re.compile(r"(^|/)(orbax|tensorstore)/|trainers/checkpoint/")
CHECKPOINT_THREAD = "checkpoint"
"""Begins the names of our own threads that see a save through."""
LAUNCHER = "trainers/worker.py"
WAITS_FOR_OTHERS = ("trainers/runtime/multihost.py", "trainers/runtime/device.py")
"""A person wants to know who called these."""

PY_SPY_THREAD = re.compile(r'Thread \w+ \([^)]*\)(?:: "(?P<name>.*)")?$')
PY_SPY_FRAME = re.compile(r"    (?P<function>.+) \((?P<file>.+):(?P<line>\d+)\)$")
OWN_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
OWN_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
PACKAGE_STARTS = (r"-packages/", r"/lib(?:64)?/python3[.\d]*/", r"/(?=(?:trainers|cluster|orchestrator)/)")
SHOWN_FRAMES = 12


@dataclass(frozen=True)
class Frame:
    function: str
    """Its own name, without that of its class."""
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
        """A pool's thread without work."""
        return all(STANDARD.search(frame.file) for frame in self.frames)

    @property
    def is_parked(self) -> bool:
        """It waits for another thread, or for an answer from outside."""
        return bool(self.frames) and STANDARD.search(self.frames[0].file) is not None

    @property
    def is_checkpointing(self) -> bool:
        if self.name:
            return self.name.startswith(CHECKPOINT_THREAD) or any(CHECKPOINTING.search(frame.file) for frame in self.frames)
        return not any(frame.file.endswith(LAUNCHER) for frame in self.frames)  # faulthandler knows no names

    @property
    def waits_on(self) -> str | None:
        """What it waits on for other hosts' sake; None if it does not."""
        if not self.frames:
            return None
        frame = self.frames[0]
        names = (f"{frame.function} {part}" for part in _endings(frame.file))
        return next((WAITING[name] for name in names if name in WAITING), None)

    @property
    def line(self) -> str | None:
        """Where it stands, in words of the user's program: libraries' frames, and how it was started, are skipped."""
        mine = [frame for frame in self.frames if not LIBRARY.search(frame.file)]
        asked = [frame for frame in mine if not frame.file.endswith(WAITS_FOR_OTHERS)] or mine
        shown = [frame for frame in asked if not frame.file.endswith(LAUNCHER)] or asked or list(self.frames)
        return str(shown[0]) if shown else None


@dataclass(frozen=True, kw_only=True)
class HostStacks:
    """What was seen of one host from outside while it hung."""

    host: int
    text: str | None = None
    state: str | None = None
    """What the kernel says of its process: `T (stopped)`."""
    batch_index: int | None = None


@dataclass(frozen=True)
class Blame:
    host: int | None
    """None if could not identify one host."""
    line: str | None
    """Where it stands; if all stand at one place, that place."""
    why: str
    groups: list[dict[str, Any]]
    """Hosts with the same stack: `hosts`, `line`, `waits_on`, `frames`; JSON-able."""


@dataclass(frozen=True)
class Standing:
    """The thread of one host that tells where it is."""

    thread: Thread
    waits_on: str | None


def parse(text: str | None) -> list[Thread]:
    """The threads of a dump; empty for a text that is none."""
    threads: list[tuple[str, list[Frame]]] = []
    for row in (text or "").splitlines():
        head = PY_SPY_THREAD.match(row) or OWN_THREAD.match(row)
        frame = PY_SPY_FRAME.match(row) or OWN_FRAME.match(row)
        if head:
            threads.append((head.groupdict().get("name") or "", []))
        elif frame and threads:
            function = frame["function"].rsplit(".", 1)[-1]  # faulthandler knows no more
            threads[-1][1].append(Frame(function, frame["file"], int(frame["line"])))
    return [Thread(name, tuple(frames)) for name, frames in threads]


def short_name(file: str) -> str:
    """The file as people know it: `trainers/loop/train_loop.py`, `jax/_src/api.py`, `my_callbacks.py`."""
    if not file.startswith("/"):
        return file
    found = (re.search(start + "(.+)$", file) for start in PACKAGE_STARTS)
    return next((match[1] for match in found if match), file.rsplit("/", 1)[-1])


def standing(text: str | None, phase: str) -> Standing | None:
    """Where a host stands in `phase`; None if its stacks tell nothing."""
    threads = [thread for thread in parse(text) if thread.frames and not thread.is_idle]
    main = next((thread for thread in threads if thread.is_main), None)
    telling = _saving(threads, main, phase) or ([main] if main else [])
    if not telling:
        return None
    if telling == [main]:
        return Standing(telling[0], telling[0].waits_on)
    busy = [thread for thread in telling if not thread.is_parked and thread.waits_on is None]
    waiting = [thread for thread in telling if thread.waits_on is not None]
    # With all threads parked, the storage does not answer: the thread that asked in our name tells more than a library's.
    asking = [thread for thread in telling if thread is not main and _innermost_own(thread)]
    chosen = [*busy, *waiting, *asking, *telling][0]
    return Standing(chosen, chosen.waits_on)


def blame(hosts: Sequence[HostStacks], phase: str) -> Blame:
    """The host that the others wait for in `phase`: by kernel state, by stack, by progress, in that order."""
    places = {seen.host: place for seen in hosts if (place := standing(seen.text, phase)) is not None}
    host, why = _accused(hosts, places)
    lines = {place.thread.line for place in places.values()}
    line = lines.pop() if host is None and len(lines) == 1 else None
    return Blame(host, places[host].thread.line if host in places else line, why, _groups(places))


def _accused(hosts: Sequence[HostStacks], places: Mapping[int, Standing]) -> tuple[int | None, str]:
    letters = {seen.host: seen.state[0] for seen in hosts if seen.state}
    stopped = sorted(host for host, letter in letters.items() if letter in STOPPED)
    if stopped:
        state = next(seen.state for seen in hosts if seen.host == stopped[0])
        more = f", like {_hosts(stopped[1:])}" if stopped[1:] else ""
        return stopped[0], f"its process is frozen, in state {state}{more}"
    busy = {host for host, place in places.items() if place.waits_on is None}
    busy |= {host for host, letter in letters.items() if letter == IN_SYSTEM_CALL and host in places}
    if len(busy) == 1:
        return min(busy), "it waits for no other host"
    silent = [seen.host for seen in hosts if seen.text and seen.host not in places]
    if not busy and len(silent) == 1 and places:
        return silent[0], "it alone shows no stack"
    suspects = busy if 0 < len(busy) < len(places) else set(places)
    batches = {seen.host: seen.batch_index for seen in hosts if seen.host in suspects and seen.batch_index is not None}
    host, why = _odd_one_out({host: places[host] for host in suspects}, batches)
    if host is None and suspects != set(places):
        return min(suspects), f"{_hosts(suspects)} wait for no other host"
    return host, why or "could not identify one host"


def _saving(threads: Sequence[Thread], main: Thread | None, phase: str) -> list[Thread]:
    """The threads that see a save through, if that is what the host is busy with or waits for."""
    in_main = main is not None and _innermost_own(main).endswith("trainers/checkpoint/manager.py")
    if phase != SAVE and not in_main:
        return []
    beside = [thread for thread in threads if thread is not main and thread.is_checkpointing]
    return [main, *beside] if main is not None and in_main else beside


def _innermost_own(thread: Thread) -> str:
    return next((frame.file for frame in thread.frames if not LIBRARY.search(frame.file)), "")


def _odd_one_out(places: Mapping[int, Standing], batches: Mapping[int, int]) -> tuple[int | None, str]:
    """The one that stands alone where the others stand together, else the one that is furthest behind."""
    kinds = {host: place.waits_on or place.thread.line for host, place in places.items()}
    count = Counter(kinds.values())
    alone = [host for host, kind in kinds.items() if count[kind] == 1]
    if len(alone) == 1 and len(places) > 2:
        return alone[0], "it alone stands there"
    last = min(batches.values(), default=0)
    behind = [host for host, batch in batches.items() if batch == last]
    if len(behind) == 1 and len(batches) > 1:
        ahead = sorted(set(batches.values()) - {last})
        return behind[0], f"it is furthest behind: at batch {last}, the others at {_numbers(ahead)}"
    return None, ""


def _groups(places: Mapping[int, Standing]) -> list[dict[str, Any]]:
    grouped: dict[tuple[Frame, ...], list[int]] = {}
    for host, place in sorted(places.items()):
        same = tuple(Frame(f.function, short_name(f.file), f.line) for f in place.thread.frames)
        grouped.setdefault(same, []).append(host)
    return [
        {
            "hosts": hosts,
            "line": places[hosts[0]].thread.line,
            "waits_on": places[hosts[0]].waits_on,
            "frames": [str(frame) for frame in frames[:SHOWN_FRAMES]],
        }
        for frames, hosts in grouped.items()
    ]


def _endings(file: str) -> list[str]:
    """`a/b/c.py` as `c.py`, `b/c.py`, `a/b/c.py`."""
    parts = file.split("/")
    return ["/".join(parts[-n:]) for n in range(1, len(parts) + 1)]


def _hosts(hosts: Iterable[int]) -> str:
    shown = sorted(hosts)
    return f"host {shown[0]}" if len(shown) == 1 else f"hosts {_numbers(shown)}"


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))

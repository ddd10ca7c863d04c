"""Drivers that take a run from each other, each a process with its generations of the gang: they save, sleep at bad moments, are
killed at any of their writes, and what they have written may be lost in a power cut.

What each restored and saved is told by `Told`, outside the run's folder. `wrong` finds what must never happen in it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SLEEPS_S = (0.0,) * 24 + (0.002, 0.005, 0.01, 0.02, 0.05, 0.3)
"""How long a driver may sleep before one of its writes, one as likely as another."""
WRITES = ("fsync", "link", "mkdir", "rename", "replace", "rmdir", "unlink")
"""Functions of `os` that change what is on a disk, or make it last."""
REQUESTS = ("create", "delete", "delete_all", "get", "list", "put", "upload")
"""Methods of stores."""


@dataclass(frozen=True)
class Driver:
    """What one driver does."""

    number: int
    seed: int
    generations: int
    saves: int
    """Of each generation."""
    killed_at: int | None
    """At which of its writes it is killed; None: it ends by itself."""
    power_cut: bool = False
    """Whether what was not made to last is lost when it is killed."""
    starts_after: int = 0
    """How many lines the drivers before it have told when it starts."""
    is_last: bool = False
    """Whether it comes when all others have ended."""


def drivers(seed: int, *, power_cuts: bool) -> list[Driver]:
    """Returns those of one case: two to four, and a last one that is left in peace. Where the power is cut there is one at a
    time, for all end with it."""
    chance = random.Random(seed)
    made = []
    for number in range(chance.randint(2, 4)):
        starts_after = chance.randrange(6) + made[-1].starts_after if made else 0
        seeds, generations, saves = chance.randrange(2**32), chance.randint(1, 2), chance.randint(1, 3)
        # About as many writes as it makes.
        killed_at = chance.randrange(10, generations * (40 + 60 * saves)) if power_cuts or chance.random() < 0.7 else None
        made.append(Driver(number, seeds, generations, saves, killed_at, power_cuts, starts_after))
    return [*made, Driver(len(made), chance.randrange(2**32), 1, 1, None, is_last=True)]


def run(driver: Driver, run_dir: str, told: Path) -> None:
    """Drives the run, in a process of its own. Never returns."""
    status = 1
    try:
        _drive(driver, run_dir, Told(told, driver.number))
        status = 0
    except BaseException:
        Told(told, driver.number)("error", why=traceback.format_exc())
    finally:
        os._exit(status)


class Told:
    """The lines that one driver tells. Each is whole, and there at once."""

    def __init__(self, path: Path, driver: int):
        self._path, self._driver = path, driver

    def __call__(self, what: str, **values: Any) -> None:
        line = json.dumps({"what": what, "driver": self._driver, "at_s": time.monotonic(), **values}) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, line.encode())
        os.close(descriptor)


def lines(told: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []


def _drive(driver: Driver, run_dir: str, tell: Told) -> None:
    import jax
    import jax.numpy as jnp

    from orchestrator.run_state.lease import RunInUse, acquire
    from tests.programs import checkpointing
    from trainers.step.state import TrainState

    jax.config.update("jax_platforms", "cpu")

    def state(number: int) -> TrainState:
        """Of one leaf, which says which state it is."""
        made = TrainState(jnp.int32(0), jnp.int32(0), {"x": jnp.full(8, number, jnp.float32)}, (), {}, {}, {})
        return jax.tree.map(lambda leaf: jax.device_put(leaf, checkpointing.everywhere()), made)

    chance = random.Random(driver.seed)
    disk = Disk(Path(run_dir)) if driver.power_cut else None
    writes = _disturb(driver, chance, disk)
    try:
        lease = acquire(run_dir, "the launch")
    except RunInUse:
        tell("lost")  # to another one that came in the same moment
        return
    tell("took over", term=[lease.driver_term, 0])
    number = 1000 * (driver.number + 1)
    for generation in range(driver.generations):
        term = [lease.driver_term, generation]
        manager = checkpointing.manager(f"{run_dir}/checkpoints", keep=2, term=checkpointing.WriterTerm(*term))
        ids: dict[int, int] = {}
        manager._saver._on_saved = lambda step, path, ids=ids, term=term: tell("saved", id=ids[step], term=term)
        restored = manager.restore(checkpointing.abstract(state(0)))
        step, parent = (0, None) if restored is None else (restored.meta["batch_index"], restored.meta["id"])
        if restored is not None and int(restored.state.params["x"][3]) != parent:
            raise AssertionError(f"the state of {parent} is that of {restored.state.params['x']}")
        tell("restored", id=parent, term=term, step=step)
        for _ in range(driver.saves):
            step, number = step + chance.randint(1, 3), number + 1
            ids[step] = number
            tell("saves", id=number, parent=parent, term=term, step=step)
            manager.save(step, state(number), {"batch_index": step, "id": number, "metrics": {}, "skipped_batches": []})
            parent = number
            if chance.random() < 0.5:
                manager.wait()
        manager.wait()
        for failed, why in manager.failed:
            tell("failed", step=failed, why=why, term=term)
    lease.release()
    tell("ended", writes=writes())


def _disturb(driver: Driver, chance: random.Random, disk: Disk | None) -> Callable[[], int]:
    """From now on this process sleeps before some of its writes, and is killed at one. Returns what counts them."""
    from gangway.storage import local_store, object_store

    count = 0

    def disturbed(function: Callable[..., Any], after: Callable[..., None] | None = None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == driver.killed_at:
                if disk is not None:
                    disk.cut_power(chance)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0 if driver.power_cut else chance.choice(SLEEPS_S))
            found = function(*args, **kwargs)
            if after is not None:
                after(*args)
            return found

        return call

    for name in WRITES:
        after = disk.keep if disk is not None and name == "fsync" else None
        setattr(os, name, disturbed(getattr(os, name), after))
    for cls in (local_store.LocalStore, object_store.ObjectStore):
        for name in REQUESTS:
            setattr(cls, name, disturbed(getattr(cls, name)))
    return lambda: count


class Disk:
    """A disk that must keep what it was told to (fsync), and may lose anything else.

    What Orbax has written lasts: it syncs its files, below Python."""

    def __init__(self, root: Path):
        self.root = root
        self._contents: dict[int, bytes] = {}
        """Of files, by inode, as they must be kept."""
        self._names: dict[int, dict[str, int]] = {}
        """Of folders: the inodes by name."""
        self._folders: set[int] = set()
        self._held: set[int] = set()
        """What is open: so no other file gets its inode once it is deleted."""
        self._cut = threading.Lock()
        """Held from a power cut on: nothing is made to last after it."""
        # What processes before this one have left lies there for long.
        for path in (root, *root.rglob("*")) if root.exists() else ():
            self._keep(path)

    def keep(self, descriptor: int) -> None:
        """The file or folder lasts as it is now."""
        with self._cut:
            self._keep(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def _keep(self, path: Path) -> None:
        if path.is_dir():
            found = {entry.name: entry for entry in os.scandir(path)}
            for entry in found.values():
                self._hold(entry.path, entry.inode())
            self._names[os.stat(path).st_ino] = {name: entry.inode() for name, entry in found.items()}
            self._folders |= {entry.inode() for entry in found.values() if entry.is_dir(follow_symlinks=False)}
        else:
            self._hold(path, os.stat(path).st_ino)
            self._contents[os.stat(path).st_ino] = path.read_bytes()

    def _hold(self, path: str | os.PathLike[str], inode: int) -> None:
        if inode not in self._held:
            self._held.add(inode)
            with suppress(FileNotFoundError):
                os.open(path, os.O_RDONLY)

    def cut_power(self, chance: random.Random) -> None:
        """Ends this process, and all its threads at once, by a power cut. Never returns. No other process may use the folder."""
        self._cut.acquire()
        warnings.simplefilter("ignore")  # of JAX, whose threads the other process does not need
        mine = os.getpid()
        if os.fork() == 0:
            # From another process: the threads of this one would go on while the disk changes.
            os.kill(mine, signal.SIGSTOP)
            while " T " not in Path(f"/proc/{mine}/stat").read_text():
                time.sleep(0.001)
            try:
                self._cut_power(chance)
            finally:
                os.kill(mine, signal.SIGKILL)
                os._exit(0)
        while True:
            time.sleep(1)

    def _cut_power(self, chance: random.Random) -> None:
        """Puts what is left by a power cut in the place of the folder."""
        left = self.root.with_name(f"{self.root.name}.left")
        there = {os.stat(path).st_ino: path for path in (self.root, *self.root.rglob("*"))} if self.root.exists() else {}
        if self.root.exists():
            self._leave(os.stat(self.root).st_ino, left, there, chance)
            _unhooked(shutil.rmtree, self.root)
            _unhooked(shutil.move, left, self.root)

    def _leave(self, inode: int, target: Path, there: Mapping[int, Path], chance: random.Random) -> None:
        path = there.get(inode)
        if path is not None and path.name == "state":
            _unhooked(shutil.copytree, path, target)
            return
        if inode in self._folders or inode in self._names or (path is not None and path.is_dir()):
            _unhooked(os.makedirs, target, exist_ok=True)
            for name, of in self._entries(inode, path, chance):
                self._leave(of, target / name, there, chance)
            return
        now = path.read_bytes() if path is not None else b""
        kept = self._contents.get(inode)
        maybe = [now, now[: len(now) // 2], b""] if kept is None else [kept, now]
        target.write_bytes(chance.choice(maybe))

    def _entries(self, inode: int, path: Path | None, chance: random.Random) -> Iterator[tuple[str, int]]:
        """Yields what is left in a folder: what had to be kept, and each change since then or not."""
        kept = self._names.get(inode, {})
        now = {entry.name: entry.inode() for entry in os.scandir(path)} if path is not None else {}
        for name in sorted({*kept, *now}):
            of = kept.get(name) if kept.get(name) == now.get(name) or chance.random() < 0.5 else now.get(name)
            if of is not None:
                yield name, of


_PLAIN = {name: getattr(os, name) for name in WRITES}


def _unhooked(work: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    for name, plain in _PLAIN.items():
        setattr(os, name, plain)
    work(*args, **kwargs)


# ---------------------------------------------------------------------- what must never happen


def wrong(told: list[dict[str, Any]]) -> list[str]:
    """Returns what is wrong with what the drivers have told."""
    parents = {line["id"]: line["parent"] for line in told if line["what"] == "saves"}
    taken_s = {line["term"][0]: line["at_s"] for line in told if line["what"] == "took over"}
    found = []

    def lineage(state: int | None) -> set[int]:
        states = set()
        while state is not None:
            states.add(state)
            state = parents.get(state)
        return states

    for line in told:
        if line["what"] == "restored":
            earlier = {other["id"] for other in told if other["what"] == "saved" and other["term"] < line["term"]}
            if lost := earlier - lineage(line["id"]):
                found.append(f"{line['term']} restored {line['id']}, and {sorted(lost)} were saved before")
        if line["what"] == "error":
            terms = [other["term"][0] for other in told if other["driver"] == line["driver"] and "term" in other]
            mine = max(terms, default=None)
            # One that was overtaken may find anything: a newer one deletes what it reads.
            if mine is None or not any(term > mine and at_s < line["at_s"] for term, at_s in taken_s.items()):
                found.append(line["why"])
    if told[-1]["what"] != "ended":
        found.append(f"the last driver has not ended, but {told[-1]}")
    if failed := [line for line in told if line["what"] == "failed" and line["driver"] == told[-1]["driver"]]:
        found.append(f"nobody disturbs the last driver, and it could not save: {failed}")
    return found


# ---------------------------------------------------------------------- the processes


class Processes:
    """Starts drivers, each as a fork of one process that has imported everything and computed nothing."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.programs.owners"]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, driver: Driver, run_dir: str, told: Path) -> int:
        """Returns the number of its process."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([asdict(driver), run_dir, str(told)]) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def live(self, process: int) -> bool:
        """Whether it still runs."""
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        self._server.kill()
        self._server.wait()


def serve() -> None:
    import tests.programs.checkpointing  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: the kernel forgets those that have ended
    for line in sys.stdin:
        driver, run_dir, told = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run(Driver(**driver), run_dir, Path(told))
        print(child, flush=True)


if __name__ == "__main__":
    serve()

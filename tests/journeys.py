"""Counts how far a thing travels through the product: the files and functions that are entered on eight journeys.

    python -m tests.journeys          # a table
    python -m tests.journeys --json   # the functions of each journey, to compare those of two commits

A function counts once, however often it is entered. Comprehensions, lambdas and nested functions are part of the function around
them, and the body of a class or a module is not a function: so the version of Python matters little.

Each part runs in a process of its own. To count the same every time, it waits until the threads beside the main one are idle
before a journey begins and before it ends, it counts at fixed steps, and it collects no garbage.
"""

from __future__ import annotations

import concurrent.futures
import gc
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from gangway.surroundings import IN_ORDER
from tests import PACKAGES, ROOT
from tests.environment import prepare

MAIN, LOADER, BACKGROUND = "main", "loader", "background"
"""Kinds of threads: the main one, those that read batches, and all others."""
CONFIGURATION, BUILD, STEP, BATCH = "configuration read", "trainer built", "steady step", "batch, loader threads"
SAVE, SAVE_BACKGROUND, RESTORE, KILL = "save", "save, background", "restore", "SIGKILL to orders"
JOURNEYS = (CONFIGURATION, BUILD, STEP, BATCH, SAVE, SAVE_BACKGROUND, RESTORE, KILL)

SAVE_STEPS = 5
STEADY_BATCH = 13
"""The batch of the steady step. Two saves came before: what only a first save does is done, and nothing else is due here."""
SETTINGS = (
    "name=journeys",
    f"checkpoint.save_steps={SAVE_STEPS}",
    "publish_every_steps=100",
    "model.num_layers=1",
    "data.sequence_length=32",
)
NUM_HOSTS, KILLED_AT_S, STEPS_OF_WORLD = 2, 4.0, 30

Functions = dict[str, list[str]]
"""The functions of each journey, as `file:function`."""


class Enough(BaseException):
    """All is counted: the rest of the training would only cost time."""


class Counter:
    """Notes the functions of the product that threads enter. `journeys` says which journey each kind of thread is on."""

    def __init__(self) -> None:
        self.journeys: dict[str, str] = {}
        self.entered: dict[str, set[str]] = defaultdict(set)
        # Collected garbage may run code of the product, in whichever thread had made the last object.
        gc.disable()
        sys.setprofile(self._note)
        threading.setprofile(self._note)

    def functions(self) -> Functions:
        return {journey: sorted(functions) for journey, functions in self.entered.items()}

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(_PRODUCT):
            return
        journey = self.journeys.get(_kind(threading.current_thread().name))
        if journey is not None and is_function(frame.f_code):
            self.entered[journey].add(f"{os.path.relpath(frame.f_code.co_filename, ROOT)}:{frame.f_code.co_qualname}")


_PRODUCT = tuple(f"{ROOT / package}{os.sep}" for package in PACKAGES)


def _kind(thread: str) -> str:
    if thread == "MainThread":
        return MAIN
    return LOADER if thread.startswith("loader") else BACKGROUND


def is_function(code: CodeType) -> bool:
    """Returns whether this is a function or method that the product names, outside of any other function."""
    # Only the code of a function is optimized: that of a class or a module keeps its names in a dictionary.
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and "<" not in code.co_qualname


def wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Replaces a method of the product by `around(original, self, ...)`, in this process."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapped)


# ------------------------------------------------------------------ what runs in a process of its own


def count_training(storage: str) -> Functions:
    """Counts a run from its configuration to a steady step."""
    from trainers.data.loader import StepAddressedLoader
    from trainers.loop.restore import Resume
    from trainers.loop.train_loop import Loop

    counter = Counter()

    def restore(original: Callable[..., Any], resume: Resume) -> Any:
        counter.journeys = {}  # the trainer is built
        return original(resume)

    def batch(original: Callable[..., Any], loader: StepAddressedLoader, k: int) -> Any:
        if k > STEADY_BATCH:
            counter.journeys = {}
            raise Enough
        if k < STEADY_BATCH:
            return original(loader, k)
        concurrent.futures.wait(loader._ahead)
        # From here on one batch is begun, as one is taken.
        counter.journeys = {MAIN: STEP, LOADER: BATCH}
        taken = original(loader, k)
        concurrent.futures.wait(loader._ahead)
        return taken

    def save(original: Callable[..., Any], loop: Loop, state: Any) -> None:
        counter.journeys = {MAIN: SAVE, BACKGROUND: SAVE_BACKGROUND}
        original(loop, state)
        counter.journeys = {BACKGROUND: SAVE_BACKGROUND}
        loop.saver.manager.wait()  # type: ignore[attr-defined]
        counter.journeys = {}

    wrap(Resume, "newest", restore)
    wrap(StepAddressedLoader, "batch", batch)
    wrap(Loop, "_save", save)
    train(counter, storage, {MAIN: CONFIGURATION}, {MAIN: BUILD})
    return counter.functions()


def count_restore(storage: str) -> Functions:
    """Counts how the next process of that run reads its checkpoint."""
    from trainers.loop.restore import Resume

    counter = Counter()

    def restore(original: Callable[..., Any], resume: Resume) -> None:
        counter.journeys = {MAIN: RESTORE}
        original(resume)
        counter.journeys = {}
        assert resume.meta, "there was no checkpoint to restore"
        raise Enough

    wrap(Resume, "newest", restore)
    train(counter, storage, {}, {})
    return counter.functions()


def train(counter: Counter, storage: str, reading: dict[str, str], building: dict[str, str]) -> None:
    """Trains until Enough is raised."""
    from trainers.commands import run
    from trainers.settings import read

    counter.journeys = reading
    arguments = read("configs/tiny.yaml", [f"storage={storage}", *SETTINGS])
    counter.journeys = building
    try:
        run.train(arguments, time.monotonic())
    except Enough:
        return
    raise AssertionError("training ended before all was counted")


def count_kill(storage: str) -> Functions:
    """Counts what a driver and its agents do from a process that is killed to the orders of the next generation."""
    from cluster.agent.inputs import Start
    from cluster.agent.state import AgentState
    from tests.unit.driving import Launched
    from tests.unit.fake_gang import World

    counter = Counter()
    world = World(max_steps=STEPS_OF_WORLD)
    launched = Launched(world, hosts=NUM_HOSTS)
    started = 0

    def kill() -> None:
        counter.journeys = {MAIN: KILL}
        (job,) = world.jobs.values()
        job.processes[1].agent.end_process(told=True)

    def handle(original: Callable[..., Any], agent: AgentState, event: Any, now_s: float) -> Any:
        nonlocal started
        effects = original(agent, event, now_s)
        started += isinstance(event, Start)
        if started == 2 * NUM_HOSTS:
            counter.journeys = {}  # all hosts have the orders of the second generation
        return effects

    wrap(AgentState, "handle", handle)
    world.at(KILLED_AT_S, kill)
    launched.run()
    assert started == 2 * NUM_HOSTS, started
    return counter.functions()


PARTS: dict[str, Callable[[str], Functions]] = {"training": count_training, "restore": count_restore, "kill": count_kill}
"""In their order: the second continues the run of the first."""


# ------------------------------------------------------------------ what starts them


def count(folder: Path) -> Functions:
    """Returns the functions of all journeys. The run is stored in `folder`."""
    entered: Functions = {}
    environ = environment()
    for part in PARTS:
        result = folder / f"{part}.json"
        command = (sys.executable, "-m", "tests.journeys", "--part", part, str(folder), str(result))
        done = subprocess.run(
            command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"the part {part!r} ended with exit status {done.returncode}; it printed:\n{done.stdout[-4000:]}")
        entered |= json.loads(result.read_text())
    return {journey: entered[journey] for journey in JOURNEYS}


def environment() -> dict[str, str]:
    environ = dict(os.environ)
    prepare(environ)
    return {**environ, "XLA_FLAGS": IN_ORDER, "PYTHONHASHSEED": "0"}


def figures(entered: Functions) -> dict[str, dict[str, int]]:
    """Returns the numbers of files and functions of each journey."""
    return {
        journey: {"files": len({function.partition(":")[0] for function in functions}), "functions": len(functions)}
        for journey, functions in entered.items()
    }


def table(rows: Mapping[str, Mapping[str, int]]) -> str:
    lines = (f"{journey:<22}{row['files']:>6}{row['functions']:>11}" for journey, row in rows.items())
    return "\n".join([f"{'journey':<22}{'files':>6}{'functions':>11}", *lines])


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--part"]:
        part, storage, result = arguments[1:]
        Path(result).write_text(json.dumps(PARTS[part](storage)))
        return
    with tempfile.TemporaryDirectory() as folder:
        entered = count(Path(folder))
    print(json.dumps(entered, indent=1) if arguments == ["--json"] else table(figures(entered)))


if __name__ == "__main__":
    main(sys.argv[1:])

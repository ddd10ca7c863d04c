"""Injects faults into a real run and scores its reaction: `python -m orchestrator.chaos CONFIG [key=value ...]`.

The run trains as usual while faults come by a seeded schedule. Then a reference run follows the lineage of the first one without
faults: the same number of hosts at each batch, the same batches skipped. Both must end in the same parameters and samples, bit
for bit; each fault must have been noticed and classified correctly; nothing may be left behind. Prints a table and writes a JSON
file. Exit status 1 if any check fails.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cluster.hosts.config import HostsConfig, devices_per_host, hosts_at_a_time, num_hosts
from gangway.config.yaml_source import shown_override
from gangway.first_line import say
from gangway.program import Parser, command
from gangway.storage import documents
from gangway.storage.opening import place_of
from gangway.storage.store import Place
from orchestrator.config.job import ConfigError, JobConfig, load
from orchestrator.faultlab.chaos import faults
from orchestrator.faultlab.chaos.injectors import Fault, Injection, Testbed, noticed
from orchestrator.faultlab.chaos.score import Disturbed, Score, score, show, unfinished_files
from orchestrator.faultlab.testbed.live_run import Run, RunError, step_of
from orchestrator.faultlab.testbed.local_cluster import local_cluster, network, why_no_network
from orchestrator.faultlab.testbed.resources import ResourceError, mlflow_server, small_disk, why_no_small_disk
from orchestrator.planning import report
from orchestrator.run_state.launch import STATE
from orchestrator.tracking.tracker import left_over
from trainers.config.data import DataConfig
from trainers.console.text import plain_console

DEFAULT_KINDS = ("process", "agent", "driver")
SMALLEST_DISK_BYTES = 64 << 20
CHECKPOINTS_ON_A_DISK = 8
"""How many checkpoints fit on the small disk: those that are kept, and one that is being written."""
LOG_WIDTH = 160
TEXTS, NUM_TEXTS = "texts", 60
NO_REFERENCE = {"status": "not run: there is nothing to compare with it"}


@command(failures=(ConfigError, RunError, ResourceError))
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(sys.argv[1:] if argv is None else argv)
    say(f"reading {arguments.config}")
    overrides = [*arguments.overrides, *hosts_overrides(arguments.hosts)]
    config = load(arguments.config, overrides)
    for line, override in (fresh_name(config), enough_steps(arguments, config)):
        if override:
            print(line, flush=True)
            overrides.append(override)
    result = play(arguments, overrides, load(arguments.config, overrides))
    show(result, plain_console(width=None if sys.stdout.isatty() else LOG_WIDTH))
    return 0 if result.passed else 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "orchestrator.chaos",
        __doc__.partition(": `")[0] + ".",
        example="config.yaml --faults process,hang --count 4",
        details="kinds of fault:\n" + "\n".join(f"  {name:18} {kind.about}" for name, kind in faults.KINDS.items()),
    )
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--faults", default=",".join(DEFAULT_KINDS), help="`all`, or some of those below")
    parser.add_argument("--count", type=int, help="how many faults in all, each kind equally often (default: each once)")
    parser.add_argument("--seed", type=int, default=0, help="of order, hosts and moments (default: 0)")
    parser.add_argument("--hosts", help="4, or 2-4 for a gang that may shrink and grow")
    parser.add_argument("--spread-s", type=float, default=1.0, help="a fault comes up to so long after the run is ready for it")
    parser.add_argument("--full-speed", action="store_true", help="do not slow the steps down while faults are to come")
    parser.add_argument("--json", help="where to write the score (default: chaos.json in the folder NAME-chaos of the storage)")
    arguments = parser.parse_intermixed_args(joined(argv))
    arguments.kinds = [*faults.KINDS] if arguments.faults == "all" else words(arguments.faults)
    if unknown := sorted(set(arguments.kinds) - set(faults.KINDS)):
        parser.error(f"--faults {', '.join(unknown)}: expected some of {', '.join(faults.KINDS)}")
    return arguments


def joined(argv: Sequence[str]) -> list[str]:
    """Returns the command line with the list after `--faults` as one word, whether it has commas or spaces between. (`nargs`
    would take the configuration and the overrides that follow, too.)"""
    result: list[str] = []
    in_list = False
    for word in argv:
        if in_list and set(words(word)) <= set(faults.KINDS):
            result[-1] += f",{word}"
            continue
        in_list = bool(result) and result[-1] == "--faults"
        result.append(word)
    return result


def words(text: str) -> list[str]:
    return [word for word in re.split(r"[,\s]+", text) if word]


def fresh_name(config: JobConfig) -> tuple[str, str | None]:
    """Returns a line for people and an override, if there is a run of this name already."""
    name, storage = config.training.name, config.training.storage
    names = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    free = next(each for each in names if not any(is_taken(storage, each, suffix) for suffix in ("", "-reference")))
    line = f"there is a run {name} in {storage} already: this one is {free}"
    return line, None if free == name else f"name={free}"


def is_taken(storage: str, name: str, suffix: str) -> bool:
    return documents.exists(documents.join(storage, f"{name}{suffix}", STATE))


def enough_steps(arguments: argparse.Namespace, config: JobConfig) -> tuple[str, str | None]:
    """Returns a line for people and an override, if the run would be over before its faults."""
    training, count = config.training, arguments.count or len(arguments.kinds)
    each = max(math.ceil(FAULT_S / LONGEST_PACE_S), 2 * (training.checkpoint.save_steps or 0))
    needed, has = (count + SPARE_SHARES) * each, training.max_num_steps
    if arguments.full_speed or has is None or has >= needed:
        return "", None
    need = f"{count} faults need" if count > 1 else "one fault needs"
    override = f"max_num_steps={needed}"
    return f"the run has {has} steps, and {need} {needed}: it gets {override}", override


def hosts_overrides(hosts: str | None) -> list[str]:
    """`3`, or `2-4`."""
    if hosts is None:
        return []
    least, dash, most = hosts.partition("-")
    return [f"hosts.min={least}", f"hosts.max={most}", "hosts.count=null"] if dash else [f"hosts.count={least}"]


def play(arguments: argparse.Namespace, overrides: Sequence[str], config: JobConfig) -> Score:
    """Makes the disturbed run, then its reference run, and writes the score."""
    skipped = {kind: why for kind in dict.fromkeys(arguments.kinds) if (why := why_not(kind, config))}
    kinds = [kind for kind in arguments.kinds if kind not in skipped]
    if not kinds:
        raise RunError("; ".join(f"{kind}: {why}" for kind, why in skipped.items()))
    planned = faults.schedule(kinds, arguments.count or len(kinds), num_hosts(config.hosts), arguments.seed, arguments.spread_s)
    with work_folder(config.run_dir) as folder:
        if faults.need(kinds, "data"):
            overrides = [*overrides, f"data.paths=[{texts_of_its_own(folder)}]"]
        run = disturb(arguments, overrides, config, planned, folder)
        finished = run.summary["status"] == "finished"
        reference = replay(arguments.config, overrides, config, run.summary, folder) if finished else NO_REFERENCE
    result = score(planned, skipped, run, reference)
    path = arguments.json or documents.join(f"{config.run_dir}-chaos", "chaos.json")
    asked = {"config": arguments.config, "overrides": [*map(shown_override, overrides)], "seed": arguments.seed}
    documents.write_json(path, {**asked, **result.to_dict()})
    print(f"written to {path}")
    return result


def texts_of_its_own(folder: Path) -> Path:
    """Returns a folder of texts, of the standard library, that may be changed."""
    made = folder.absolute() / TEXTS
    made.mkdir(parents=True)
    for source in sorted(Path(os.__file__).parent.glob("*.py"))[:NUM_TEXTS]:
        shutil.copyfile(source, made / f"{source.stem}.txt")
    return made


@contextmanager
def work_folder(run_dir: str) -> Iterator[Path]:
    """Yields the folder NAME-chaos, for orders, logs and the console. Of a run in a bucket it is a temporary one, and NAME-chaos
    in the bucket gets the console."""
    if not documents.is_url(run_dir):
        yield Path(f"{run_dir}-chaos")
        return
    with tempfile.TemporaryDirectory(prefix="gangway-chaos-") as temporary:
        folder = Path(temporary)
        try:
            yield folder
        finally:
            console = folder / "console.log"
            if console.exists():
                documents.write_text(documents.join(f"{run_dir}-chaos", console.name), console.read_text(errors="replace"))


def why_not(kind: str, config: JobConfig) -> str | None:
    """Returns why this kind of fault cannot be tried here; None if it can."""
    needs = faults.KINDS[kind].needs.split()
    if on_a_cluster([kind]):
        kind_needed = "tpu" if "slices" in needs else "cpu"
        if config.hosts.kind != kind_needed:
            return f"it needs a cluster of its own on this machine, and hosts of kind {kind_needed}, not {config.hosts.kind}"
        if os.environ.get("RAY_ADDRESS") or config.driver.address:
            return "it needs a cluster of its own, and the run is to use one that is there"
    if "end" in needs and config.training.max_num_steps is None:
        return "it comes as the run ends, and nobody knows where that is; set max_num_steps"
    if "data" in needs and (config.training.data.dataset != DataConfig.dataset or config.training.data.prepared is not None):
        return "it changes the texts of a run, and this one learns from other data; leave data.dataset and data.prepared out"
    if "network" in needs:
        return why_no_network()
    return why_no_such_storage(needs, config)


def why_no_such_storage(needs: Sequence[str], config: JobConfig) -> str | None:
    wanted = [what for what in needs if what in ("disk", "freezable", "folder")]
    if wanted and documents.is_url(config.run_dir):
        what = "a folder that can be renamed" if wanted == ["folder"] else "a disk of its own"
        return f"it needs {what}, and the storage is a bucket; set storage=PATH"
    return why_no_small_disk(freezable="freezable" in wanted) if {"disk", "freezable"} & {*wanted} else None


def on_a_cluster(kinds: Collection[str]) -> bool:
    return any(faults.need(kinds, what) for what in ("cluster", "network", "slices"))


def disturb(
    arguments: argparse.Namespace, overrides: Sequence[str], config: JobConfig, planned: Sequence[Fault], folder: Path
) -> Disturbed:
    kinds = {fault.kind for fault in planned}
    injections: list[Injection] = []
    trouble, began_s = None, time.time()
    with ExitStack() as resources:
        testbed, run_dir = build_testbed(resources, arguments.config, overrides, config, kinds, folder)
        run = testbed.run
        max_steps = None if arguments.full_speed else config.training.max_num_steps
        try:
            inject_all(testbed, planned, max_steps, injections)
            run.finish()
        except RunError as error:
            trouble = str(error)
        finally:
            left = run.clean_up()
        # When the processes are gone: what the cluster still holds then was left behind.
        if testbed.cluster:
            left += testbed.cluster.left_behind()
        left += unfinished_files(run.run_dir)
        if any(injection.kind == "tracking" and injection.healed_at_s > run.ended_at_s() for injection in injections):
            run.ship_the_rest()
        # The small disk is gone after this block.
        if run_dir != place_of(config.run_dir):
            shutil.copytree(run_dir.path, config.run_dir, ignore=shutil.ignore_patterns("checkpoints"), dirs_exist_ok=True)
        tracked = config.tracking.mlflow or testbed.mlflow is not None
        not_shipped = left_over(str(run.tracking())) if tracked else None
        if testbed.mlflow and (ended := testbed.mlflow.why_it_ended()):
            trouble = trouble or ended
        ended_by_us = {"status": "ended by chaos", "incidents": run.incidents(), "goodput": {}, "wall_s": 0.0}
        summary = ended_by_us if trouble else run.summary()
        if testbed.cluster and summary["status"] != "finished":
            testbed.cluster.keep_logs(folder / "ray")
        return Disturbed(injections, summary, left, not_shipped, trouble, began_s, time.time(), run.process.returncode)


def build_testbed(
    resources: ExitStack, config_path: str, overrides: Sequence[str], config: JobConfig, kinds: Collection[str], folder: Path
) -> tuple[Testbed, Place]:
    """Starts the run on the resources that these kinds need. Returns the testbed and the run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    run_overrides = [*overrides, *faults.overrides_for(kinds)]
    env: dict[str, str] = {}
    run_dir: Place = place_of(config.run_dir)
    disk = server = cluster = net = programs = None
    if faults.need(kinds, "programs"):
        programs = folder.absolute() / "programs"  # not those of this machine's other runs
        run_overrides.append(f"hosts.env.GANGWAY_PROGRAMS={programs}")
    freezable = faults.need(kinds, "freezable")
    if freezable or faults.need(kinds, "disk"):
        disk = resources.enter_context(small_disk(disk_bytes(config), freezable=freezable))
        run_overrides.append(f"storage={disk.folder}")
        run_dir = place_of(disk.folder / config.training.name)
    if faults.need(kinds, "network"):
        net = resources.enter_context(network())
    if faults.need(kinds, "mlflow"):
        # The driver that follows a killed one may be on a node with a network of its own, where 127.0.0.1 is another place.
        server = resources.enter_context(mlflow_server(folder, net.head_ip if net else "127.0.0.1"))
        run_overrides += ["tracking.mlflow=true", f"tracking.uri={server.uri}"]
    if faults.need(kinds, "supervisor"):
        run_overrides.append("driver.supervise=true")
    if on_a_cluster(kinds):
        slices_of = config.hosts if config.hosts.kind == "tpu" else None
        cluster = resources.enter_context(local_cluster(net, slices_of))
        env = {"RAY_ADDRESS": cluster.address, **cluster.authentication}
    surroundings = {what: faults.need(kinds, what) for what in ("terminal", "reader")}
    run = Run(config_path, run_overrides, run_dir.url, folder, env, **surroundings)
    # If something fails below: the run must not outlive its resources.
    resources.callback(run.clean_up)
    run.start()
    if cluster:
        # The driver must be on the head before there are other nodes: any of those may be lost.
        run.wait((run.run_dir / "lease.json").exists, "the driver")
        for _ in range(num_hosts(config.hosts) // hosts_at_a_time(config.hosts) + config.hosts.spares + 1):
            cluster.add_machines()
    training = config.training
    data = folder.absolute() / TEXTS if faults.need(kinds, "data") else None
    return Testbed(run, cluster, disk, server, programs, data, training.max_num_steps, training.checkpoint.save_steps), run_dir


def disk_bytes(config: JobConfig) -> int:
    return max(SMALLEST_DISK_BYTES, CHECKPOINTS_ON_A_DISK * (report.check(config).checkpoint_bytes or 0))


def inject_all(testbed: Testbed, planned: Sequence[Fault], max_steps: int | None, injections: list[Injection]) -> None:
    """Injects the faults one after the other, each after recovery from the one before. Injects fewer if the run ends before.

    Appends to `injections`. Raises RunError if the run does not recover from a fault.
    """
    run, overcome, left, injected = testbed.run, Overcome(testbed, injections), deque(planned), list[Fault]()
    pace = Pace(run, max_steps)
    run.between_looks = pace.keep
    while left:
        pace.share_out(len(left) + SPARE_SHARES)
        if not run.wait(lambda: overcome() and run.standbys_are_warm(), "the run to be ready for a fault"):
            return
        if injections and lost_to_a_resize(injections[-1], run.incidents()):
            left.appendleft(injected.pop())
            injections.pop()
        fault = left.popleft()
        if "fresh" in faults.KINDS[fault.kind].needs:
            wait_for_fresh_checkpoint(run)
        else:
            time.sleep(fault.delay_s)
        if run.running():
            injections.append(faults.inject(testbed, fault))
            injected.append(fault)
    run.wait(overcome, "the last fault to be overcome")
    run.full_speed()


def lost_to_a_resize(injection: Injection, incidents: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether the gang was resized before the fault could show: then its process was ended by the resize."""
    kind = faults.KINDS[injection.kind]
    since = {incident["kind"] for incident in incidents[injection.incidents_before :]}
    return kind.must_show and "resize" not in kind.named and since == {"resize"}


class Overcome:
    """Whether the last fault has shown, the run has recovered, and a checkpoint was completed since then.

    Only the clock of this process is used: a wrong clock on a machine of the run may be the fault.
    """

    def __init__(self, testbed: Testbed, injections: Sequence[Injection]):
        self.testbed, self.injections = testbed, injections
        self._num_incidents = 0
        self._calm_since_s = 0.0

    def __call__(self) -> bool:
        run, incidents = self.testbed.run, self.testbed.run.incidents()
        # Of several incidents without a step between them, only the last one gets a `resumed_step`.
        recovering = bool(incidents) and incidents[-1]["resumed_step"] is None
        if recovering or len(incidents) != self._num_incidents:
            self._num_incidents, self._calm_since_s = len(incidents), run.now_s()
        if not self.injections:
            return bool(run.checkpoints())
        last = self.injections[-1]
        if recovering or (faults.KINDS[last.kind].must_show and not noticed(self.testbed, last)):
            return False
        return run.saved_after(max(last.healed_at_s, self._calm_since_s))


def wait_for_fresh_checkpoint(run: Run) -> None:
    """Waits for a new checkpoint, and for an older one to fall back to."""
    now_s = run.now_s()
    run.wait(lambda: len(run.checkpoints()) > 1 and run.saved_after(now_s), "two checkpoints")


def replay(
    config_path: str, overrides: Sequence[str], config: JobConfig, summary: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Makes an undisturbed run along the lineage of `summary`; returns its summary."""
    run_overrides = [*overrides, f"name={config.training.name}-reference", "tracking.mlflow=false", *on_cpus(config.hosts)]
    if not is_plain(summary, num_hosts(config.hosts)):
        path = folder / "lineage.json"
        documents.write_json(path, {name: summary[name] for name in ("lineage", "skipped_batches")})
        run_overrides.append(f"driver.replay={path}")
    with tempfile.TemporaryDirectory(prefix="gangway-reference-") as orders:
        run = Run(config_path, run_overrides, f"{config.run_dir}-reference", Path(orders))
        run.start()
        try:
            run.finish()
        finally:
            run.clean_up()
        return run.summary()


def on_cpus(hosts: HostsConfig) -> list[str]:
    """Returns overrides for a reference run on as many CPU hosts, for a run on fake TPU slices."""
    if hosts.kind != "tpu":
        return []
    cpu_settings = {
        "kind": "cpu",
        "count": num_hosts(hosts),
        "devices_per_host": devices_per_host(hosts),
        "slices": 1,
        "spares": 0,
    }
    tpu_settings = dict.fromkeys(("accelerator", "topology", "min_slices", "max_slices"), "null")
    return [f"hosts.{name}={value}" for name, value in {**cpu_settings, **tpu_settings}.items()]


def is_plain(summary: Mapping[str, Any], hosts: int) -> bool:
    """Returns whether that run trained on all its hosts from beginning to end, and skipped no batch."""
    segments: Iterable[dict[str, Any]] = summary.get("lineage") or ()
    return not summary.get("skipped_batches") and [segment["num_hosts"] for segment in segments] in ([], [hosts])


SPARE_SHARES = 1
"""Shares of the steps that belong to no fault: for a fault that a resize has hidden, and for recoveries that take long."""
FAULT_S, LONGEST_PACE_S, SLOWEST_PACE_S = 12.0, 0.15, 3.0
"""Steps are slowed down so that a fault's share of them lasts FAULT_S: by at most LONGEST_PACE_S a step. When most of the share
is used, or all takes long, it is by at most SLOWEST_PACE_S."""


class Pace:
    """Slows a run down, so that it does not end before its last fault.

    Each fault has its share of the steps that are left when its turn comes. A recovery may take longer than FAULT_S, as that
    of a driver on a busy machine, and the hosts go on meanwhile: steps get slower and slower when half of the share is used. So
    does the start of standbys, which nobody sees in the steps: those that are left must last as long as was waited already.
    """

    LOOK_S = 1.0

    def __init__(self, run: Run, max_steps: int | None, clock: Callable[[], float] = time.monotonic):
        self._run, self._max_steps, self._clock = run, max_steps, clock
        self._step = self._share = self._end = 0
        self._looked_s = self._began_s = 0.0
        self._now: float | None = None

    def share_out(self, faults_left: int) -> None:
        self._look()
        self._share = max(0, (self._max_steps or 0) - self._step) // faults_left
        self._end, self._began_s = self._step + self._share, self._looked_s
        self._set()

    def keep(self) -> None:
        """To be called while something is waited for."""
        if self._share and self._clock() - self._looked_s > self.LOOK_S:
            self._look()
            self._set()

    def _look(self) -> None:
        # Not what the driver has told: it may be gone. Without a checkpoint (they may be what is gone), what is known is kept.
        self._step = step_of(newest[-1]) if (newest := self._run.checkpoints()) else self._step
        self._looked_s = self._clock()

    def _set(self) -> None:
        pace = pace_s(self._share, self._end - self._step, self._looked_s - self._began_s)
        if pace != self._now:
            self._run.pace(pace)
            self._now = pace


def pace_s(share: int, left: int, waited_s: float) -> float | None:
    """Returns by how much to slow down each step when `left` steps are left of a fault's share; None: not at all."""
    if share <= 0:
        return None
    left = max(1, left)
    used = min(LONGEST_PACE_S, FAULT_S / share) * max(1.0, share / 2 / left)
    return min(SLOWEST_PACE_S, max(used, waited_s / left))

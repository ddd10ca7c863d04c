"""A Ray cluster of two machines by the very commands of docs/deploy.md, and a job on it.

Each machine is a set of namespaces: a network with an address of its own, processes, a folder of Ray, a home folder. Only `ssh`,
which takes the token from one to the other, is a program of this test.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from orchestrator.faultlab.testbed.local_cluster import Network, network, why_no_network
from orchestrator.faultlab.testbed.resources import wait_for
from tests import ROOT
from tests.programs.processes import PATIENCE_S
from tests.unit.documents import blocks_of
from tests.unit.orchestrator.deploy.test_scripts import programs

WINGS = ("orchestrator/deploy", "cluster/hosts", "cluster/placement", "orchestrator/driver/ray_cluster.py")

NO_NETWORK = why_no_network()
pytestmark = [
    pytest.mark.slow("starts a Ray of two nodes, and two runs on it"),
    pytest.mark.skipif(NO_NETWORK is not None, reason=str(NO_NETWORK)),
]
GANGWAY = f'exec {sys.executable} -m orchestrator.gangway "$@"\n'


class Machine:
    """Namespaces of network, processes and mounts, which last until `close`."""

    def __init__(self, number: int, net: Network, folder: Path):
        self.ip, self.home, self.folder = net.ip_of(number), folder / f"home-{number}", folder
        self.home.mkdir()
        ray, space = os.environ["RAY_TMPDIR"], net.add(number)
        # A disk of its own where Ray keeps its sockets: these paths must be short, and two machines never share them.
        first = f"mount -t tmpfs none {shlex.quote(ray)} && exec sleep infinity"
        command = ["ip", "netns", "exec", space, "unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", first]
        self._unshare = subprocess.Popen(command)
        wait_for(lambda: self._init() is not None, f"the namespaces of machine {number}")

    def _init(self) -> psutil.Process | None:
        """The first process in its namespace, once all is mounted."""
        below = psutil.Process(self._unshare.pid).children()
        return below[0] if below and below[0].name() == "sleep" else None

    def run(self, text: str, cwd: Path | None = None) -> str:
        """Runs the lines of a block in a shell of this machine, and returns what they print. They must succeed."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
            "HOME": str(self.home),
            "PATH": f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),  # it is installed
            "RAY_TMPDIR": os.environ["RAY_TMPDIR"],
            "RAY_worker_niceness": os.environ["RAY_worker_niceness"],  # noqa: SIM112  at Ray's own, 15, they starve beside other tests
        }
        inside = ["nsenter", f"--target={self._init().pid}", "--net", "--mount", "--pid", f"--wd={cwd or self.home}"]
        with (self.folder / f"printed-{self.home.name}.log").open("a+") as printed:
            start = printed.tell()
            done = subprocess.run(
                [*inside, "bash", "-euc", text],
                env=env, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT, timeout=PATIENCE_S, check=False,
            )  # fmt: skip
            printed.seek(start)
            said = printed.read()
        assert done.returncode == 0, said
        return said

    def processes(self) -> list[str]:
        """The command lines of what runs on it."""
        space = os.readlink(f"/proc/{self._init().pid}/ns/pid")
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            try:
                same = os.readlink(f"/proc/{process.pid}/ns/pid") == space
            except OSError:
                continue
            if same and process.pid != self._init().pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.info["cmdline"] or ()))
        return found

    def close(self) -> None:
        """Ends all that runs on it: it dies with the first process of its namespace."""
        if init := self._init():
            init.kill()
        self._unshare.wait()


def guide() -> list[str]:
    """The blocks of the section, in their order."""
    path = ROOT / "docs" / "deploy.md"
    lines = path.read_text().splitlines()
    first = lines.index("## Machines of your own") + 1
    last = next(number for number, line in enumerate(lines, 1) if number > first and line.startswith("## "))
    return [block.text for block in blocks_of(path) if first < block.line < last]


@pytest.fixture
def machines(tmp_path):
    with ExitStack() as stack:
        net = stack.enter_context(network())
        found = []
        for number in range(2):
            found.append(Machine(number, net, tmp_path))
            stack.callback(found[-1].close)
        # The two machines share the disk here, and nothing else: the other one's home folder is a folder.
        programs(tmp_path / "bin", gangway=GANGWAY, ssh=f'cd {found[1].home}\nexec sh -c "$2"\n')
        yield found


def test_the_commands_of_the_guide_start_a_cluster_that_runs_a_job(machines, tmp_path):
    code, runs = tmp_path / "code", tmp_path / "runs"
    code.mkdir()
    config = yaml.safe_load((ROOT / "configs" / "tiny.yaml").read_text())
    (code / "config.yaml").write_text(yaml.safe_dump(config | {"name": "tiny", "tracking": {"mlflow": False}}))
    head, other = machines
    start, join, submit, connect, stop = (
        text.replace("HEAD_IP", head.ip).replace("FOLDER", str(runs)).replace("MACHINE", other.ip) for text in guide()
    )
    head.run(start)
    assert (other.home / ".ray" / "auth_token").read_text() == (head.home / ".ray" / "auth_token").read_text()
    assert (other.home / ".ray" / "auth_token").stat().st_mode & 0o077 == 0
    other.run(join)
    with training_seen(machines) as seen:
        said = head.run(submit, code)
    assert re.search(r"Job '\S+' succeeded", said), said
    assert ended(runs) == ("finished", 2, 1)
    assert seen == {head.ip, other.ip}, said
    with training_seen(machines) as seen:
        head.run(connect, code)
    assert seen == {head.ip, other.ip}
    assert ended(runs) == ("finished", 2, 2)
    for machine in machines:
        machine.run(stop)
        wait_for(lambda machine=machine: not machine.processes(), "nothing to be left of Ray")


def ended(runs: Path) -> tuple[str, int, int]:
    summary = json.loads((runs / "tiny" / "summary.json").read_text())
    return summary["status"], summary["hosts"], summary["launches"]


@contextmanager
def training_seen(machines: list[Machine]) -> Iterator[set[str]]:
    """Collects the addresses of the machines on which a training process runs meanwhile."""
    seen: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(1.9):
            seen.update(machine.ip for machine in machines if any("trainers.worker" in line for line in machine.processes()))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()

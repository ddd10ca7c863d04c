"""The seconds of all processes that a process has started are counted, once, whoever collects them."""

import itertools
import subprocess
import sys
import time

import psutil
import pytest

from tests.process_tree import Meter, ProcessTree, kind_of
from tests.programs.processes import is_gone, wait_until

BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"
PARENT = """
import signal, subprocess, sys, time
if {ignores}:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", {burn!r}])
print("started", flush=True)
while child.poll() is None:
    time.sleep(0.05)
input()
"""


@pytest.mark.parametrize("ignores", [False, True])
def test_a_child_of_a_child_counts_whether_its_parent_collects_it_or_not(ignores):
    """Ray's raylet does not, and the kernel forgets what its children have used."""
    program = PARENT.format(ignores=ignores, burn=BURN.format(seconds=0.5))
    tree, seen = ProcessTree(), []
    before = tree.read()  # the servers of other tests
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "started\n"

        def burnt():
            seen.append(tree.read() - before)
            return seen[-1]["commands"] >= 0.4 and all(is_gone(child.pid) for child in psutil.Process(process.pid).children())

        assert wait_until(burnt, every_s=0.05), seen[-1]
        process.stdin.write("\n")
        process.stdin.close()
    seen.append(tree.read() - before)
    assert all(later.total() >= earlier.total() for earlier, later in itertools.pairwise(seen))
    assert seen[-1]["commands"] < 1.5, "twice"


def test_what_comes_and_goes_between_two_looks_is_counted_by_its_parent():
    tree = ProcessTree()
    before = tree.read()
    subprocess.run([sys.executable, "-c", BURN.format(seconds=0.4)], check=True)
    assert 0.35 <= (tree.read() - before)["commands"] < 1.0


def test_a_meter_looks_at_the_tree_only_after_a_start():
    meter = Meter()
    looks = []
    look, meter._tree.read = meter._tree.read, lambda: looks.append(1) or look()
    meter.read()
    assert not looks
    subprocess.run([sys.executable, "-c", BURN.format(seconds=0.2)], check=True)
    assert meter.read()["commands"] >= 0.15  # the kernel counts in ticks
    assert looks
    used_s = time.process_time()
    assert meter.read()["own"] >= used_s


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("/usr/bin/python -u -m trainers.worker", "training"),
        ("python -u -m tests.multihost.fork_server 12", "training"),
        ("ray::HostAgent", "agents"),
        ("/x/ray/core/src/ray/raylet/raylet --raylet_socket_name", "ray"),
        ("python -m mlflow server", "mlflow"),
        ("sleep 5", "commands"),
    ],
)
def test_kinds_of_processes(command, kind):
    assert kind_of(command) == kind

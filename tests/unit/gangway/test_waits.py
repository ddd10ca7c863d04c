"""Waits that a request to stop ends, and the list of all waits."""

import ast
import itertools
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import yaml
from obstore.exceptions import GenericError

from cluster.placement.placement_groups import wait_answers
from gangway import waits
from gangway.storage.object_store import LIMITS, ObjectStore
from gangway.storage.store import StorageUnavailable
from orchestrator.run_state import lease
from tests import ROOT


class Stopped(Exception):
    pass


@pytest.fixture
def clock(monkeypatch):
    """Time goes by as it is slept."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    monkeypatch.setattr(ray, "wait", clock.wait)
    return clock


class Clock:
    def __init__(self):
        self.at_s, self.answers = 0.0, {}

    def now(self):
        return self.at_s

    def sleep(self, seconds):
        self.at_s += seconds

    def wait(self, refs, num_returns, timeout):
        """As `ray.wait`: until so many have answered; `answers` says when each does."""
        due = sorted(self.answers.get(ref, float("inf")) for ref in refs)
        self.at_s = max(self.at_s, min(self.at_s + timeout, due[num_returns - 1]))
        ready = [ref for ref in refs if self.answers.get(ref, float("inf")) <= self.at_s]
        return ready, [ref for ref in refs if ref not in ready]


def stop_at(count):
    calls = itertools.count(1)

    def check_stop():
        if next(calls) == count:
            raise Stopped

    return check_stop


def test_a_wait_ends_when_it_is_done_or_its_time_is_over(clock):
    assert waits.wait_until(lambda: clock.at_s > 3, 5)
    assert not waits.wait_until(lambda: False, 5)
    clock.answers = {"a": clock.at_s + 1, "b": clock.at_s + 70}
    assert wait_answers(["a", "b"], clock.at_s + 60) == ["a"]
    assert wait_answers(["a", "b"], clock.at_s + 60) == ["a", "b"]
    assert wait_answers([], clock.at_s + 60) == []


@pytest.mark.parametrize(
    "wait",
    [
        lambda check_stop: waits.wait_until(lambda: False, 1000, check_stop),
        lambda check_stop: wait_answers(["never"], 1000, check_stop),
    ],
)
def test_whoever_waits_is_asked_at_least_once_a_second_and_may_end_it(clock, wait):
    seen = []

    def check_stop():
        seen.append(clock.at_s)
        if len(seen) == 20:
            raise Stopped

    with pytest.raises(Stopped):
        wait(check_stop)
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 1


def never(answer):
    raise GenericError(answer)


def bucket(monkeypatch):
    """A store whose every request fails as one of a bucket that does not answer."""
    client = SimpleNamespace(get=lambda name: never("error sending request"))
    ObjectStore("s3://one", client, "").get("row/1")


def lease_of_another_machine(monkeypatch):
    holder = lease.Holder(
        driver_term=1, launch_id="a", hostname="b", machine="c", pid=1, since_s=0.0, renewed_at_s=0.0, renewed_s=0.0
    )
    monkeypatch.setattr(lease, "_latest", lambda run_dir: (holder, 1))
    lease.wait_until_free("run", ttl_s=1000.0)


@pytest.mark.parametrize("wait", [bucket, lease_of_another_machine, lambda patch: waits.pause(1000.0)])
@pytest.mark.parametrize("at_s", [0.0, 7.3, 20.0])
def test_what_a_thread_heeds_ends_each_wait_below(clock, monkeypatch, wait, at_s):
    """That of the storage, of the lease, and of a pause; nothing is heeded once the block is left."""

    def check_stop():
        if clock.at_s >= at_s:
            raise Stopped

    with pytest.raises(Stopped), waits.heeding(check_stop):
        wait(monkeypatch)
    assert clock.at_s <= at_s + 1.0
    if wait is bucket:
        with pytest.raises(StorageUnavailable):
            wait(monkeypatch)
        assert clock.at_s > LIMITS.patience_s - LIMITS.longest_wait_s


def test_no_other_thread_heeds_it():
    ended = []
    with waits.heeding(stop_at(1)):
        thread = threading.Thread(target=lambda: ended.append(waits.pause(0.01)))
        thread.start()
        thread.join()
    assert ended == [None]


def test_work_that_hangs_is_not_waited_for_longer_than_is_allowed_and_that_may_become_shorter():
    assert waits.in_time(lambda: 3, lambda: 60.0) == 3
    with pytest.raises(KeyError):
        waits.in_time(lambda: {}["a"], lambda: 60.0)
    hang, allowed_s = threading.Event(), itertools.chain([600.0], itertools.repeat(0.0))
    with pytest.raises(TimeoutError, match="no answer within 1 s"):
        waits.in_time(hang.wait, lambda: next(allowed_s))
    hang.set()


def test_a_request_that_came_before_is_heeded_at_once(clock):
    with pytest.raises(Stopped):
        wait_answers(["never"], 1000, stop_at(1))
    with pytest.raises(Stopped):
        waits.wait_until(lambda: False, 1000, stop_at(1))
    assert clock.at_s == 0


WAITS = {
    *("sleep", "wait", "wait_for", "pause", "wait_until", "wait_answers", "wait_ready", "is_ready", "wait_available"),
    *("communicate", "collect", "gather", "ask_hosts"),
}
OF_THE_COMMAND = ("gangway", "cluster", "orchestrator")
HARNESS = "orchestrator/faultlab/"


def waits_in(path):
    """The functions of a file with a call that waits."""
    found = set()

    def look(node, names):
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            if isinstance(child, ast.Call) and is_wait(child):
                found.add(".".join(names))
            look(child, [*names, child.name] if named else names)

    look(ast.parse(path.read_text()), [])
    return found


def is_wait(call):
    whole = ast.unparse(call.func)
    name = whole.rpartition(".")[2]
    if whole in ("ray.get", "subprocess.run"):
        return True
    if name == "join":  # of a thread, not of texts or paths
        return not call.args or (len(call.args) == 1 and "timeout_s" in ast.unparse(call.args[0])) or "hread" in whole
    if name == "get":  # of a queue
        return any(word.arg == "timeout" for word in call.keywords) or whole.endswith(("_waiting.get", "_requests.get"))
    return name in WAITS


def test_each_wait_of_the_command_and_the_driver_is_in_the_list():
    paths = {str(path.relative_to(ROOT)): path for top in OF_THE_COMMAND for path in (ROOT / top).rglob("*.py")}
    there = {(name, where) for name, path in paths.items() if not name.startswith(HARNESS) for where in waits_in(path)}
    groups = yaml.safe_load((Path(__file__).parents[1] / "data" / "waits.yaml").read_text()).values()
    listed = Counter((name, where) for group in groups for name, functions in group.items() for where in functions)
    assert (sorted(there - listed.keys()), sorted(listed.keys() - there)) == ([], [])
    assert max(listed.values()) == 1

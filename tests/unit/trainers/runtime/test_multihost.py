"""Agreement between many hosts: what each of them hears, how often it calls the coordinator, and who is named."""

from __future__ import annotations

import itertools
import re
import threading
from collections import Counter

import jax
import pytest

from gangway.errors import CoordinatorError, UsageError
from gangway.surroundings import accelerators
from tests.programs.processes import PATIENCE_S
from trainers.checkpoint.commit import CommitError, Exchange
from trainers.runtime import distributed, multihost


class Coordinator:
    """The part of jax.distributed's service that is used: keys that may be waited for. Counts each host's calls, and bytes."""

    def __init__(self):
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()
        self.calls: Counter[int] = Counter()
        self.heard_bytes: Counter[int] = Counter()

    def client(self, host):
        return Client(self, host)


class Client:
    def __init__(self, coordinator, host):
        self.coordinator, self.host = coordinator, host

    def key_value_set(self, key, value):
        with self._called() as coordinator:
            assert key not in coordinator.values
            coordinator.values[key] = value
            coordinator.changed.notify_all()

    def key_value_delete(self, key):
        with self._called() as coordinator:
            for name in [name for name in coordinator.values if name == key or name.startswith(f"{key}/")]:
                del coordinator.values[name]

    def key_value_dir_get(self, folder):
        with self._called() as coordinator:
            return [(key, self._heard(value)) for key, value in coordinator.values.items() if key.startswith(folder)]

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self._called() as coordinator:
            if not coordinator.changed.wait_for(lambda: key in coordinator.values, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self._heard(coordinator.values[key])

    def _heard(self, value):
        self.coordinator.heard_bytes[self.host] += len(value)
        return value

    def _called(self):
        self.coordinator.calls[self.host] += 1
        return Entered(self.coordinator)


class Entered:
    def __init__(self, coordinator):
        self.coordinator = coordinator

    def __enter__(self):
        self.coordinator.changed.acquire()
        return self.coordinator

    def __exit__(self, *error):
        self.coordinator.changed.release()


@pytest.fixture(autouse=True)
def nothing_past(monkeypatch):
    monkeypatch.setattr(multihost, "_past", [])


def all_at_once(hosts, work):
    """What `work(host)` returned or raised, by host, each in a thread."""
    results = {}

    def run(host):
        try:
            results[host] = work(host)
        except (CoordinatorError, CommitError) as error:
            results[host] = error

    threads = [threading.Thread(target=run, args=(host,)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return results


def exchange(coordinator, host, num_hosts, value, number=0, timeout_s=PATIENCE_S):
    return multihost.exchange(coordinator.client(host), host, num_hosts, f"agree/{number}/topic", "topic", value, timeout_s)


@pytest.mark.parametrize("num_hosts", [2, 5, 64])
def test_all_hear_all_in_host_order(num_hosts):
    coordinator = Coordinator()
    heard = all_at_once(range(num_hosts), lambda host: exchange(coordinator, host, num_hosts, {"from": host % 3, "none": None}))
    assert set(heard) == set(range(num_hosts))
    assert all(values == [{"from": host % 3, "none": None} for host in range(num_hosts)] for values in heard.values())


def test_each_host_makes_two_calls_and_host_0_no_more_than_it_must():
    """It reads the directory, and waits for the last few one by one."""
    num_hosts = 64
    coordinator = Coordinator()
    all_at_once(range(num_hosts), lambda host: exchange(coordinator, host, num_hosts, ""))
    assert {coordinator.calls[host] for host in range(1, num_hosts)} == {2}
    assert coordinator.calls[0] <= 2 * num_hosts  # each of them comes after a look of its own, at worst
    coordinator.calls.clear()
    for host in range(1, num_hosts):
        coordinator.client(host).key_value_set(f"agree/1/topic/of/{host}", '""')
    assert exchange(coordinator, 0, num_hosts, "", number=1) == [""] * num_hosts
    assert coordinator.calls[0] == 3  # the look, the answer, and what is past is deleted


def test_what_all_say_alike_is_sent_once():
    def heard_bytes(num_hosts):
        coordinator = Coordinator()
        say = {host: {"problem": "" if host != 3 else "x"} for host in range(num_hosts)}
        all_at_once(range(num_hosts), lambda host: exchange(coordinator, host, num_hosts, say[host], number=num_hosts))
        return coordinator.heard_bytes[1]

    assert heard_bytes(64) == heard_bytes(16) > 0


def test_nothing_is_kept_of_what_all_have_heard():
    coordinator = Coordinator()
    for number in range(5):
        all_at_once(range(4), lambda host, number=number: exchange(coordinator, host, 4, host, number))
    assert {key.split("/")[1] for key in coordinator.values} == {"4"}


def test_who_does_not_come_is_named_to_all(monkeypatch):
    monkeypatch.setattr(multihost, "FEW", 2)
    coordinator = Coordinator()
    heard = all_at_once([0, 1, 2, 4, 5], lambda host: exchange(coordinator, host, 6, "", timeout_s=0.4))
    assert len(heard) == 5
    assert {str(error).partition(":")[0] for error in heard.values()} == {"no answer from host 3 on 'topic' within 0 s"}


def test_a_missing_host_0_is_named(monkeypatch):
    monkeypatch.setattr(multihost, "GRACE_S", 0.0)
    coordinator = Coordinator()
    heard = all_at_once([1, 2], lambda host: exchange(coordinator, host, 3, "", timeout_s=0.4))
    assert all(str(error).startswith("no answer from host 0 on 'topic'") for error in heard.values())


def save(coordinator, host, num_hosts, work, lead, **how):
    made = Exchange("4.saving-1")
    made.host, made.num_hosts, made._client = host, num_hosts, coordinator.client(host)
    return made.all_or_none("topic", lambda: work(host), lead, **how)


@pytest.mark.parametrize("num_hosts", [1, 3, 64])
def test_each_host_hears_its_own_part_of_a_save_only(num_hosts):
    coordinator = Coordinator()
    parts = [[f"file-{host}-{n}" for n in range(50)] for host in range(num_hosts)]
    heard = all_at_once(
        range(num_hosts), lambda host: save(coordinator, host, num_hosts, lambda h: h, lambda told: parts, parts=True)
    )
    assert heard == dict(enumerate(parts))
    assert all(coordinator.heard_bytes[host] < 1000 and coordinator.calls[host] == 2 for host in range(1, num_hosts))
    assert coordinator.calls[0] <= 3 * num_hosts


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("num_hosts", [3, 64])
def test_a_problem_of_one_host_in_a_save_is_all_hosts(num_hosts, parts):
    coordinator = Coordinator()

    def work(host):
        if host == 2:
            raise OSError(5, "Input/output error")

    heard = all_at_once(range(num_hosts), lambda host: save(coordinator, host, num_hosts, work, lambda told: told, parts=parts))
    assert {str(error) for error in heard.values()} == {"host 2: OSError: [Errno 5] Input/output error"}


def test_the_questions_of_many_hosts_are_spread_and_those_of_few_are_quick():
    def asked(num_hosts, times=200, chance=lambda: 0.5):
        return list(itertools.islice(distributed.asking_waits_s(num_hosts, chance), times))

    assert max(asked(2)) <= 0.004
    assert asked(4096)[0] <= 0.004  # if it listens soon, it is soon known
    assert 4096 / max(asked(4096)) <= distributed.QUESTIONS_PER_S
    assert asked(4096, chance=lambda: 0.0) != asked(4096, chance=lambda: 1.0)


# ---------------------------------------------------------------------- accelerators that are not used


@pytest.mark.parametrize(
    ("asked", "installed", "here", "of_gang", "told"),
    [
        ("", (), {}, False, None),
        ("cpu", (), {}, True, None),
        ("cpu", (), {"cuda": 8}, False, None),  # the user's own choice
        (
            "",
            (),
            {"cuda": 8},
            False,
            "note: this machine has 8 GPUs of NVIDIA, and the run trains on its CPU: pip install 'gangway[cuda]'",
        ),
        ("cpu", ("libtpu",), {"tpu": 4}, True, "note: this machine has 4 TPUs, and the run trains on its CPU: hosts.kind=tpu"),
        (
            "cpu",
            (),
            {"cuda": 1},
            True,
            "note: this machine has 1 GPU of NVIDIA, and .*: hosts.kind=gpu, and pip install 'gangway",
        ),
        (
            "cuda,cpu",
            (),
            {},
            True,
            r"JAX_PLATFORMS=cuda,cpu \(by hosts.kind=gpu\), and JAX has no GPUs .*: pip install 'gangway\[cuda\]'",
        ),
        (
            "tpu",
            ("libtpu",),
            {"tpu": 4},
            False,
            r"JAX_PLATFORMS=tpu, and JAX has no TPUs here: .* finds none \(4 on this machine\)",
        ),
    ],
)
def test_who_would_train_on_cpus_without_wanting_to_hears_of_it(monkeypatch, asked, installed, here, of_gang, told):
    monkeypatch.setenv("JAX_PLATFORMS", asked)
    monkeypatch.setattr(distributed, "accelerators", lambda: here)
    monkeypatch.setattr(distributed.importlib.util, "find_spec", lambda name: name if name in installed else None)
    notes = []
    if told is None or told.startswith("note: "):
        distributed.check_platform(notes.append, of_gang=of_gang)
        assert len(notes) == (told is not None)
        assert all(re.match((told or "").removeprefix("note: ").replace("[", r"\["), note) for note in notes)
    else:
        with pytest.raises(UsageError, match=told):
            distributed.check_platform(notes.append, of_gang=of_gang)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["dev/null", "dev/nvidiactl", "dev/nvidia-uvm"], {}),
        (["dev/nvidia0", "dev/nvidia1", "dev/nvidiactl"], {"cuda": 2}),
        (["dev/accel0", "dev/accel1", "dev/accel2", "dev/accel3"], {"tpu": 4}),
        (["dev/vfio/0", "dev/vfio/vfio", "sys/bus/pci/devices/0000:00:04.0/vendor=0x1ae0"], {"tpu": 1}),
        (["dev/vfio/0", "sys/bus/pci/devices/0000:00:04.0/vendor=0x8086"], {}),
        (["sys/bus/pci/devices/0000:00:04.0/vendor=0x1ae0"], {}),  # a network card of a virtual machine
    ],
)
def test_the_accelerators_of_a_machine(tmp_path, files, found):
    for name in files:
        path, _, content = name.partition("=")
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{content}\n")
    assert accelerators(str(tmp_path)) == found

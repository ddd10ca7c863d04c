"""How much of its machine a host uses: what is read, and that a run publishes it."""

import time
from types import SimpleNamespace

import psutil
import pytest

from tests.unit.training import of, trainer
from trainers import runtime
from trainers.metrics.host_usage import (
    CPU,
    DISK_READ,
    DISK_WRITTEN,
    MEMORY,
    NAMES,
    PROCESS_MEMORY,
    RATES,
    RECEIVED,
    SENT,
    TOTAL_MEMORY,
    HostUsage,
    largest,
)


def test_memory_is_that_of_the_machine_and_of_this_process():
    usage = HostUsage().read()
    assert set(usage) == set(NAMES) - set(RATES)  # no second has passed
    memory = psutil.virtual_memory()
    assert usage[TOTAL_MEMORY] == memory.total
    assert usage[MEMORY] == pytest.approx(memory.total - memory.available, rel=0.2)
    before = psutil.Process().memory_info().rss
    assert usage[PROCESS_MEMORY] == pytest.approx(before, rel=0.2)
    block = bytearray(b"x") * (256 << 20)
    assert HostUsage().read()[PROCESS_MEMORY] > before + 0.9 * len(block)


def test_cpu_time_is_that_since_the_last_reading():
    usage = HostUsage()
    usage.read()
    end_s = time.monotonic() + 0.5
    while time.monotonic() < end_s:
        pass
    # One core was busy all the time.
    assert 0.7 * 100 / psutil.cpu_count() <= usage.read()[CPU] <= 100


def test_disks_and_networks_are_rates_over_at_least_a_second(monkeypatch):
    now, disks, networks = [0.0], SimpleNamespace(read_bytes=100, write_bytes=0), SimpleNamespace(bytes_recv=10, bytes_sent=20)
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: disks)
    monkeypatch.setattr(psutil, "net_io_counters", lambda: networks)
    usage = HostUsage(lambda: now[0])

    def rates(at_s):
        now[0] = at_s
        return {name: value for name, value in usage.read().items() if name in RATES}

    disks.read_bytes, networks.bytes_sent = 500, 40
    assert rates(0.5) == {}
    assert rates(2.0) == {DISK_READ: 200.0, DISK_WRITTEN: 0.0, RECEIVED: 0.0, SENT: 10.0}
    disks.read_bytes = 600
    assert rates(2.5)[DISK_READ] == 200.0
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)  # as in some containers
    networks.bytes_sent = 0  # set back
    assert rates(4.0) == {RECEIVED: 0.0}


def test_of_several_hosts_the_largest_values_count():
    assert largest([{CPU: 3.0, MEMORY: 5.0}, {}, {CPU: 4.0, MEMORY: 2.0}]) == {CPU: 4.0, MEMORY: 5.0}
    assert largest([{}]) == {}


def test_a_run_publishes_what_was_read_at_its_publish_and_keeps_it_for_the_heartbeats(tmp_path, events, monkeypatch):
    readings = iter(range(1, 100))
    monkeypatch.setattr(HostUsage, "read", lambda self: {CPU: float(next(readings))})
    trainer(tmp_path, max_num_steps=4, publish_every_steps=2, checkpoint={"save_at_end": False}).train()
    published = [event["metrics"][CPU] for event in of(events, "metrics") if "loss" in event["metrics"]]
    assert published == [1.0, 2.0]
    assert runtime.current().usage == {CPU: 2.0}
    assert CPU not in of(events, "metrics")[-1]["metrics"]  # the evaluation at the end

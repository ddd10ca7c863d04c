"""How much of its machine a host uses: what is read, and that a run publishes it."""

import time

import psutil
import pytest

from tests.unit.training import of, trainer
from trainers import runtime
from trainers.metrics.host_usage import CPU, MEMORY, NAMES, PROCESS_MEMORY, TOTAL_MEMORY, HostUsage, largest


def test_memory_is_that_of_the_machine_and_of_this_process():
    usage = HostUsage().read()
    assert set(usage) == set(NAMES)
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

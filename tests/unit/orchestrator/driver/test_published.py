"""What the driver publishes of what the hosts tell."""

from types import SimpleNamespace

import pytest

from orchestrator.driver.event_handler import EventHandler
from orchestrator.driver.generation import Generation
from orchestrator.driver.states import Halting, Recovering, Saving, Training
from orchestrator.policies.stragglers import StragglerPolicy
from orchestrator.reporting.board import Board
from orchestrator.run_state.goodput import Goodput
from orchestrator.run_state.progress import Progress
from orchestrator.tracking.prometheus import Gauges
from trainers.metrics.host_usage import CPU, MEMORY


class Told(Gauges):
    """Keeps what Prometheus would get, by name and labels."""

    def __init__(self, run):
        super().__init__(run)
        self.told = {}

    def set(self, metric, value, *labels):
        self.told[metric.name, *labels] = value


@pytest.fixture
def handler():
    """Of a launch that publishes everything; `published` has what reached its recorders."""
    ignore = SimpleNamespace(report=lambda *args: None)
    gauges = Told("run")
    launch = SimpleNamespace(
        progress=Progress(Goodput(0.0), generations=1),
        publish=lambda step, metrics: tracked.append(metrics),
        mark=lambda *args, **fields: None,
        resumed=lambda step: False,
    )
    published, tracked = [], []
    recorders = SimpleNamespace(record=lambda step, metrics, distributions: published.append((step, metrics)))
    made = EventHandler(launch, Board(), ignore, recorders, gauges, StragglerPolicy(), lambda: 0.0)  # type: ignore[arg-type]
    made.published, made.tracked, made.told = published, tracked, gauges.told
    return made


def tell(handler, generation, host, kind, **fields):
    handler.handle(generation, host, {"t": 0.0, "n": 0, "ev": kind, **fields})


def beat(handler, generation, host, **usage):
    tell(handler, generation, host, "heartbeat", step=1, batch_index=1, usage=usage)


def of_all_hosts(handler):
    """What reached the recorders, without what is of each host by itself."""
    return [
        (step, {name: value for name, value in metrics.items() if not name.startswith("system/")})
        for step, metrics in handler.published
    ]


def test_of_the_use_of_the_machines_the_largest_value_is_published(handler):
    generation = Generation(0, 3)
    handler.start(generation)
    beat(handler, generation, 1, **{CPU: 90.0, MEMORY: 4.0})
    beat(handler, generation, 1, **{CPU: 80.0, MEMORY: 5.0})  # the newest counts
    tell(handler, generation, 2, "heartbeat", step=1, batch_index=1)  # of a trainer that tells nothing of it
    tell(handler, generation, 0, "metrics", step=1, metrics={"loss": 2.0, CPU: 10.0, MEMORY: 7.0})
    tell(handler, generation, 0, "metrics", step=1, metrics={"eval_loss": 2.0})
    assert of_all_hosts(handler) == [(1, {"loss": 2.0, CPU: 80.0, MEMORY: 7.0}), (1, {"eval_loss": 2.0})]


def test_what_hosts_have_asked_of_a_bucket_is_counted(handler):
    generation = Generation(0, 2)
    handler.start(generation)
    for host in (0, 1):
        tell(handler, generation, host, "requests_made", counts={"put": 2 + host, "bytes_out": 100})
    assert handler.launch.progress.requests == {"put": 5, "bytes_out": 200}


def test_prometheus_gets_what_is_published_the_state_and_each_host(handler):
    generation = Generation(0, 2)
    handler.start(generation)
    beat(handler, generation, 1, **{MEMORY: 4.0})
    tell(handler, generation, 0, "metrics", step=1, metrics={"loss": 2.0})
    handler.enter(Training())
    handler.enter(Recovering())
    told = handler.told
    assert (told["gangway_loss",], told["gangway_hosts",], told["gangway_host_memory_bytes", "1"]) == (2.0, 2, 4.0)
    assert (told["gangway_state", "recovering"], told["gangway_state", "training"]) == (1.0, 0.0)


@pytest.mark.parametrize("state", [Saving(0), Halting()], ids=lambda state: state.label)
def test_a_first_step_that_is_reported_late_is_no_training_again(handler, state):
    """By the last events of a generation, which the halt delivers."""
    generation = Generation(0, 1)
    handler.start(generation)
    handler.enter(Training())
    handler.enter(state)
    tell(handler, generation, 0, "first_step", step=1, resumed_step=0)
    assert handler.state == state


def test_trackers_have_what_each_host_uses_of_its_machine_every_ten_seconds(handler):
    generation, times = Generation(0, 40), iter([0.0, 9.0, 10.0])
    handler.start(generation)
    for host in (1, 31, 32):
        beat(handler, generation, host, **{CPU: 90.0 + host})
    found = []
    for step, now_s in enumerate(times, 1):
        handler.clock = lambda now_s=now_s: now_s
        tell(handler, generation, 0, "metrics", step=step, metrics={"loss": 2.0, CPU: 10.0})
        found.append({name: value for name, value in handler.tracked[-1].items() if name.startswith("system/")})
    by_host = {f"system/host-0/{CPU}": 10.0, f"system/host-1/{CPU}": 91.0, f"system/host-31/{CPU}": 121.0}
    assert found == [by_host, {}, by_host]
    assert [metrics for _, metrics in handler.published] == handler.tracked, "recorders have the same, by the same names"


def test_what_a_host_of_an_earlier_gang_used_is_forgotten(handler):
    first, second = Generation(0, 2), Generation(1, 1)
    handler.start(first)
    beat(handler, first, 1, **{CPU: 90.0})
    handler.start(second)
    tell(handler, second, 0, "metrics", step=1, metrics={"loss": 2.0, CPU: 10.0})
    assert of_all_hosts(handler) == [(1, {"loss": 2.0, CPU: 10.0})]


def notes_after(handler, machines):
    generation = Generation(0, len(machines))
    handler.launch.progress.time_used = SimpleNamespace(begin=lambda at_s: None)
    handler.start(generation)
    before = len(handler.board.read(0, 0.0)[1])
    for host, machine in enumerate(machines):
        assert len(handler.board.read(0, 0.0)[1]) <= before + 1  # the status alone, until all have joined
        tell(handler, generation, host, "joined", pid=4711 + host, machine=machine)
    return [event["message"] for event in handler.board.read(0, 0.0)[1][before:] if event["ev"] == "note"]


@pytest.mark.parametrize(
    ("machines", "line"),
    [
        (["a"], "training process 4711 (host 0)"),
        (["a", "a"], "training processes 4711 (host 0), 4712 (host 1)"),
        (["a", "b"], "training processes 4711 (host 0 on a), 4712 (host 1 on b)"),
    ],
)
def test_the_processes_that_one_may_kill_are_reported_in_each_generation(handler, machines, line):
    assert notes_after(handler, machines) == [line]
    assert notes_after(handler, machines) == [line]


def test_of_many_processes_some_are_reported(handler):
    (line,) = notes_after(handler, ["a"] * 10)
    assert line.endswith("4718 (host 7), and 2 more")

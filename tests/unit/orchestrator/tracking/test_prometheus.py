"""The metrics that go out through Ray: their names, their tables in docs/metrics.md, and what a run gives them."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from gangway.wire.limits import PHASES
from orchestrator.driver import exported
from orchestrator.driver.states import FOLLOWERS
from orchestrator.run_state.goodput import CATEGORIES, Goodput
from orchestrator.run_state.progress import Progress
from orchestrator.tracking import prometheus
from tests import ROOT

PAGE = (ROOT / "docs" / "metrics.md").read_text()
ROWS = re.findall(r"^\| `ray_(\w+)` \{([^}]+)\} \| ([^|]+) \| (.+) \|$", PAGE, re.M)
SOURCES = re.findall(r"^\| `([A-Z_.]+)` \| (.+) \|$", PAGE, re.M)
UNITS = {"seconds": "s", "bytes": "bytes", "ratio": "1", "second": "tokens/s"}


class FakeMetric:
    """A gauge or a counter of Ray's."""

    def __init__(self, name, text, tag_keys):
        self.tag_keys, self.values = tag_keys, {}

    def key(self, tags):
        assert set(tags) == set(self.tag_keys)
        return tuple(tags.values())


class FakeGauge(FakeMetric):
    def set(self, value, tags):
        self.values[self.key(tags)] = value


class FakeCounter(FakeMetric):
    def inc(self, value, tags):
        assert value > 0  # Ray refuses others
        self.values[self.key(tags)] = self.values.get(self.key(tags), 0) + value


@pytest.fixture
def gauges(monkeypatch):
    monkeypatch.setattr(prometheus, "Gauge", FakeGauge)
    monkeypatch.setattr(prometheus, "Counter", FakeCounter)
    return prometheus.Gauges("tiny")


def of(gauges, name, *labels):
    return gauges._made[name].values["tiny", *labels]


def test_the_page_has_each_metric_with_its_labels_unit_and_text():
    run = {metric: "workload_id" if metric in prometheus.OF_GOOGLE else "run" for metric in prometheus.METRICS}
    rows = [(m.name, ", ".join((run[m], *m.labels)), m.unit, m.text) for m in prometheus.METRICS]
    assert sorted(ROWS) == sorted(rows)


def test_the_page_has_the_source_of_each_category():
    told = {category: source for source, categories in SOURCES for category in categories.split(", ")}
    assert told == prometheus.BADPUT_SOURCES
    assert {*told, "step"} == set(CATEGORIES)


def test_the_page_has_the_name_that_a_number_has_elsewhere():
    pairs = dict(re.findall(r"^\| `(\w+)` \| `ray_(\w+)` \|$", PAGE, re.M))
    assert pairs == {name: metric.name for name, metric in prometheus.PUBLISHED.items()}


def test_names_tell_their_units():
    for metric in prometheus.METRICS:
        assert re.fullmatch(r"(gangway|workload)_[a-z_]+", metric.name)
        if (suffix := metric.name.rpartition("_")[2]) in UNITS:
            assert metric.unit == UNITS[suffix], metric
        elif metric not in prometheus.OF_GOOGLE:  # these have no suffixes
            assert metric.unit not in ("s", "bytes"), metric


def test_published_numbers_go_out_and_others_do_not(gauges):
    gauges.publish({"loss": 2.5, "mfu": 0.4, "perplexity": 12.0})
    assert {name: of(gauges, name) for name in gauges._made} == {"gangway_loss": 2.5, "gangway_mfu_ratio": 0.4}


def test_a_counter_gets_what_is_new_and_never_falls(gauges):
    for total in (2, 2, 5, 1, 6):
        gauges.set(prometheus.GENERATIONS, total)
    assert of(gauges, "gangway_generations_total") == 6


def test_the_ledger_goes_out_under_both_names(gauges):
    gauges.ledger(dict.fromkeys(CATEGORIES, 1.0) | {"step": 86.0}, 0.86)
    assert of(gauges, "gangway_goodput_ratio") == 0.86
    assert of(gauges, "gangway_time_seconds", "replay") == 1.0
    assert of(gauges, "workload_goodput_time", "TOTAL") == 86.0
    assert of(gauges, "workload_badput_time", "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION") == 3.0
    lost = sum(gauges._made["workload_badput_time"].values.values())
    assert lost + 86.0 == of(gauges, "workload_total_elapsed_time", "CUMULATIVE") == 100.0


@pytest.fixture
def run(gauges):
    progress = Progress(Goodput(0.0, "step"), max_steps=100, generations=1)
    return SimpleNamespace(gauges=gauges, progress=progress, exported=exported.ExportedMetrics(gauges, progress))


def test_a_run_is_in_one_state(run):
    for label in (*(state.label for state in FOLLOWERS if state.label), *(phase.label for phase in PHASES.values())):
        run.exported.state(label, 1.0)
        states = run.gauges._made["gangway_state"].values
        assert {state for (_, state), value in states.items() if value} == {label}


def test_what_follows_from_the_progress_is_told_once_a_second(run):
    run.exported.often(7, 10.0)
    run.exported.often(8, 10.9)
    assert of(run.gauges, "gangway_step") == 7
    run.exported.often(9, 11.0)
    assert of(run.gauges, "gangway_step") == 9
    assert of(run.gauges, "gangway_max_steps") == 100
    assert of(run.gauges, "gangway_time_seconds", "step") == 11.0
    assert of(run.gauges, "workload_disruptions", "CUMULATIVE") == 0


def test_incidents_are_counted_by_kind_those_of_earlier_drivers_too(run):
    run.progress.num_incidents, run.progress.entries = 3, [incident("hang"), incident("killed")]
    run.exported.now(1, 1.0)
    kinds = {kind: value for (_, kind), value in run.gauges._made["gangway_incidents_total"].values.items()}
    assert kinds == {"hang": 1, "killed": 1, exported.NOT_KEPT: 1}
    run.progress.num_incidents, run.progress.entries = 4, [*run.progress.entries, incident("killed")]
    run.exported.now(1, 2.0)
    assert of(run.gauges, "gangway_incidents_total", "killed") == 2


def incident(kind):
    return SimpleNamespace(incident=SimpleNamespace(kind=kind))


def test_a_host_tells_its_memory_and_how_long_it_works_at_a_step(run):
    usage = {"host_cpu_percent": 50.0, "host_memory_bytes": 2e9, "unknown": 1.0}
    for batches, busy_s in ((10, 5.0), (20, 8.0), (20, 8.5)):
        run.exported.host(1, {"batch_index": batches, "busy_s": busy_s, "usage": usage})
    assert of(run.gauges, "gangway_host_step_seconds", "1") == pytest.approx(0.3)
    assert of(run.gauges, "gangway_host_cpu_ratio", "1") == 0.5
    assert of(run.gauges, "gangway_host_memory_bytes", "1") == 2e9


def test_a_host_that_the_gang_has_no_more_has_no_numbers(run):
    for host in (0, 1):
        run.exported.host(host, {"batch_index": 1, "busy_s": 1.0, "usage": {"host_memory_bytes": 2e9}})
    run.exported.start(1)
    assert of(run.gauges, "gangway_hosts") == 1
    assert of(run.gauges, "gangway_host_memory_bytes", "0") == 2e9
    assert of(run.gauges, "gangway_host_memory_bytes", "1") != of(run.gauges, "gangway_host_memory_bytes", "1")  # NaN

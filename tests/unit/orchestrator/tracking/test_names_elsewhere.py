"""A published number has one name in metrics.jsonl, TensorBoard, Weights & Biases and MLflow: that of docs/metrics.md. What
Prometheus has is among them, or belongs to a moment and not to a step."""

from types import SimpleNamespace

from gangway import published
from orchestrator.run_state.goodput import CATEGORIES
from orchestrator.run_state.summary import of_the_end
from orchestrator.tracking import prometheus
from orchestrator.tracking.mlflow_shipper import shown
from orchestrator.tracking.prometheus import PUBLISHED
from tests import ROOT
from tests.unit.trainers.recorders.test_recorders import about, events
from trainers.metrics import host_usage
from trainers.recorders.jsonl import JsonLines, read
from trainers.recorders.tensorboard import TensorBoard
from trainers.recorders.wandb import WeightsAndBiases

NUMBERS = {name: float(number) for number, name in enumerate(PUBLISHED, 1)}


def test_every_recorder_has_the_same_names(tmp_path):
    board, lines, logged = TensorBoard(about(tmp_path)), JsonLines(about(tmp_path)), {}
    cloud = object.__new__(WeightsAndBiases)  # without its service
    cloud._run = SimpleNamespace(log=lambda numbers, step: logged.update(numbers))
    for recorder in (board, lines, cloud):
        recorder.record(10, NUMBERS, {})
    board.close()
    lines.close()
    (line,) = read(tmp_path / "metrics.jsonl")
    (path,) = (tmp_path / "tensorboard").iterdir()
    values = [event.summary.value[0] for event in events(path) if event.summary.value]
    assert {value.tag: value.simple_value for value in values} == line["metrics"] == logged == NUMBERS


LAUNCH = {"goodput": dict.fromkeys(CATEGORIES, 0.0), "wall_s": 1.0}
SUMMARY = {**LAUNCH, "launch": LAUNCH, "incidents": [], "num_incidents": 0}
SAME = {
    prometheus.GOODPUT: ["goodput/share"],
    prometheus.TIME: [f"goodput/{category}_s" for category in CATEGORIES],
    prometheus.INCIDENTS: ["incidents/count"],
}
"""Of a metric of the run for Prometheus, what recorders and MLflow have."""
OF_THE_MOMENT = {
    *(prometheus.STATE, prometheus.STEP, prometheus.MAX_STEPS, prometheus.CHECKPOINT_STEP, prometheus.HOSTS),
    prometheus.GENERATIONS,
}
"""Other systems have the settings of a run as parameters, and each number by its step."""


def test_what_prometheus_has_of_the_run_is_elsewhere_too_or_of_the_moment():
    assert {*prometheus.OF_RUN} == {*SAME, *OF_THE_MOMENT}
    ends = of_the_end(SUMMARY)
    assert {name for names in SAME.values() for name in names} <= {*ends}
    assert all(name.startswith(published.SYSTEM_PREFIXES) for name in ends), "no user's metric"
    assert {*prometheus.OF_HOSTS} - {*host_usage.NAMES} == {"step_time_s"}
    text = (ROOT / "docs" / "metrics.md").read_text()
    documented = {"goodput/CATEGORY_s", *(name for name in ends if name.removeprefix("goodput/")[:-2] not in CATEGORIES)}
    assert {name for name in documented if f"`{name}`" not in text} == set()


def test_mlflow_has_them_too_those_of_machines_on_its_page_of_systems():
    ours = {shown(name) for name in PUBLISHED}
    ends = of_the_end(SUMMARY)
    assert {shown(name) for name in ends} == {f"system/{name}" for name in ends}, (
        "its page of the others begins with the training"
    )
    assert ours == {f"system/{name}" if name.startswith("device_memory") else name for name in PUBLISHED}

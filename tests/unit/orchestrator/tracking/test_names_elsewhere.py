"""A published number has one name in metrics.jsonl, TensorBoard, Weights & Biases and MLflow: that of docs/metrics.md."""

from types import SimpleNamespace

import pytest

from orchestrator.tracking.mlflow_shipper import shown
from orchestrator.tracking.prometheus import PUBLISHED
from tests.unit.trainers.recorders.test_recorders import about, events
from trainers.recorders.jsonl import JsonLines, read
from trainers.recorders.tensorboard import TensorBoard
from trainers.recorders.wandb import WeightsAndBiases

NUMBERS = {name: float(number) for number, name in enumerate(PUBLISHED, 1)}


@pytest.mark.costs("imports the writer of TensorBoard's files")
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


def test_mlflow_has_them_too_those_of_machines_on_its_page_of_systems():
    ours = {shown(name) for name in PUBLISHED}
    assert ours == {f"system/{name}" if name.startswith("device_memory") else name for name in PUBLISHED}

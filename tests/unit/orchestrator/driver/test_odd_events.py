"""What the user's code makes its process send is checked at the driver's door: an odd event is told and dropped, never fatal."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from gangway.wire.events import problem_for_driver as problem_of
from orchestrator.driver.event_handler import EventHandler
from orchestrator.driver.generation import Finished, Generation
from orchestrator.policies.stragglers import StragglerPolicy
from orchestrator.reporting.board import Board
from orchestrator.run_state.goodput import Goodput
from orchestrator.run_state.progress import Progress
from orchestrator.tracking.prometheus import Gauges

ODD = [
    None,
    [],
    {"ev": "metrics", "t": 1.0, "n": 0, "step": "3", "metrics": {}},
    {"ev": "metrics", "t": 1.0, "n": 0, "step": 3, "metrics": {"loss": "1.5"}},
    {"ev": "metrics", "t": "now", "n": 0, "step": 3, "metrics": {}},
    {"ev": "metrics", "n": 0, "step": 3, "metrics": {}},
    {"ev": "first_step", "t": float("nan"), "n": 0, "step": 3},
    {"ev": "saved", "t": 1.0, "n": 0, "step": 3, "path": None},
    {"ev": "phase", "t": 1.0, "n": 0, "phase": {}},
    {"ev": "preview", "t": 1.0, "n": 0, "step": 3, "previews": 5},
    {"ev": "anomaly", "t": 1.0, "n": 0},
    {"ev": "evaluating", "t": 1.0, "n": 0, "unit": "a", "done": 1, "total": "many"},
    {"ev": "unheard of", "t": 1.0, "n": 0},
]


def handler(board):
    launch = MagicMock(progress=Progress(Goodput(0.0)))
    nothing = SimpleNamespace(report=pytest.fail, record=pytest.fail)
    gauges = Gauges("run")
    gauges.publish = pytest.fail
    return EventHandler(launch, board, nothing, nothing, gauges, StragglerPolicy(), lambda: 100.0)


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_an_odd_event_is_reported_once_and_the_next_one_is_handled(odd):
    board = Board()
    events, generation = handler(board), Generation(0, 1)
    sound = {"ev": "phase", "t": 2.0, "n": 1, "phase": "join", "generation": 0}
    for cursor in (2, 4):
        events.catch_up(generation, {0: {"events": [odd, sound], "cursor": cursor, "heartbeat": odd}})
    assert generation.phases == {0: "join"}
    assert events.launch.progress.seen == {0: 4}
    notes = [event["message"] for event in board.read(0, 0.0)[1] if event["ev"] == "note"]
    assert len(notes) == 1
    assert notes[0].startswith("host 0: an event that its training process has sent is left out: ")


def test_an_end_without_a_reason_is_an_end():
    for about in ({}, {"stop_reason": "because", "result": {}}):
        generation = Generation(0, 1)
        generation.observe(0, {"ev": "done", "t": 1.0, "step": 3, **about})
        assert generation.end == Finished("max_steps", {})


def test_a_number_that_is_not_finite_is_one():

    assert problem_of({"ev": "metrics", "t": 1.0, "n": 0, "step": 3, "metrics": {"loss": float("nan")}}) == ""

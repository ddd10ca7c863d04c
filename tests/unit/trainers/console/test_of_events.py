"""What a console shows of the events of a training process."""

from __future__ import annotations

import pytest

from gangway.wire.events import Event
from trainers.console import view


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"ev": "note", "message": "for people"}, ["for people"]),
        ({"ev": "preview", "step": 3, "previews": [{"prompt": "a", "text": "b\n"}]}, ["step 3  'a' -> 'b\\n'"]),
        (
            {"ev": "save_failed", "step": 3, "error": "no room"},
            ["the checkpoint of step 3 failed, and is tried again: no room"],
        ),
        (
            {"ev": "restored", "step": 3, "skipped": [{"step": 5, "why": "it is damaged"}]},
            ["checkpoint 5 was not used: it is damaged", "the state of step 3 is restored"],
        ),
        (
            {"ev": "anomaly", "kind": "loss_spike", "batch_index": 7, "loss": 9.0, "action": "rollback", "restored_step": 4},
            ["loss_spike in batch 7 (loss 9.0): rollback, back to step 4"],
        ),
        ({"ev": "profile", "id": None, "problem": "no room"}, ["no profile: no room"]),
        ({"ev": "profile", "id": None, "problem": None, "path": "/p"}, ["a profile is in /p"]),
        ({"ev": "evaluating", "unit": "eval", "done": 1, "total": 4}, []),
        ({"ev": "evaluating", "unit": "eval", "done": 4, "total": 4}, ["evaluated eval: 4 batches"]),
        ({"ev": "warm"}, []),
    ],
)
def test_the_lines_of_an_event(event: Event, expected):
    assert view.lines(event) == expected


@pytest.mark.parametrize(("phase", "state"), [("preview", "generating previews"), ("my own", "my own")])
def test_a_phase_is_shown_as_the_driver_shows_it(phase, state):
    assert view.for_console({"ev": "phase", "phase": phase}) == [{"ev": "status", "state": state}]

"""Messages of any length: they are cut where they are made, and keep their beginning and their end."""

from __future__ import annotations

import json

from cluster.agent.process_record import note
from gangway.text import cut
from trainers import runtime, worker

LONG = "first line " + "x" * (8 << 20) + " the cause"


def raised():
    try:
        raise ValueError(LONG)
    except ValueError as error:
        return error


def test_the_beginning_and_the_end_stay():
    found = cut(LONG)
    assert found.startswith("first line x")
    assert found.endswith("x the cause")
    assert "8,384,6" in found.partition("[")[2]
    assert len(found) < 4100
    assert cut("as it is") == "as it is"


def test_an_exception_is_an_event_of_a_few_pages(events):
    event = worker.exception_event(raised())
    assert len(json.dumps(event)) < 30_000
    assert event["message"].endswith("the cause")
    assert event["traceback"].startswith("Traceback")
    assert event["user_traceback"].startswith("Traceback")


def test_a_note_is_cut_on_both_sides_of_the_pipe(events):
    runtime.current().note(LONG)
    assert len(events[-1]["message"]) < 4100
    assert len(note(LONG, 0.0)["message"]) < 4100

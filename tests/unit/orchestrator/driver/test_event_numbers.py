"""Events of an agent's log that was too small: what is left of them keeps its numbers, and no event counts twice."""

from types import SimpleNamespace

from cluster.agent.event_log import EventLog
from orchestrator.driver.event_handler import EventHandler
from orchestrator.driver.generation import Generation
from orchestrator.policies.stragglers import StragglerPolicy
from orchestrator.reporting.board import Board
from orchestrator.run_state.goodput import Goodput
from orchestrator.run_state.progress import Progress
from orchestrator.tracking.prometheus import Gauges


def events():
    """Of a launch that has taken in nothing yet."""
    launch = SimpleNamespace(progress=Progress(Goodput(0.0)))
    return EventHandler(launch, Board(), None, None, Gauges("run"), StragglerPolicy(), lambda: 0.0)  # type: ignore[arg-type]


def tell(log, *kinds):
    for kind in kinds:
        log.append({"t": 1.0, "ev": kind, "step": log.next, "error": "full", "message": str(log.next)})


def poll(log, cursor=0):
    return {"events": log.since(cursor), "cursor": log.next, "heartbeat": None, "host_state": {}}


def posted(taken):
    return [event["message"] for event in taken.board.read(0, 0.0)[1]]


def test_an_event_is_known_by_its_number_though_others_before_it_were_dropped():
    """A driver that adopts a gang gets the whole log: what its predecessor had counted must not count again."""
    log, taken = EventLog(8), events()
    tell(log, "note", "note", "save_failed", "save_failed", "note")
    taken.handle_answer(Generation(0, 1), 0, poll(log))
    assert len(posted(taken)) == 5
    tell(log, *["note"] * 9, "save_failed")
    dropped = poll(log)
    assert [event["n"] for event in dropped["events"]][:2] == [2, 3]  # those between them and the others are gone
    assert len(dropped["events"]) < log.next - 2
    taken.catch_up(Generation(0, 1), {0: dropped})
    new = [event for event in dropped["events"] if event["n"] >= 5]
    assert len(posted(taken)) == 5 + len(new)
    assert sum("the checkpoint of step" in text for text in posted(taken)) == 3

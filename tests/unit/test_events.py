"""The schemas of events: what a reader asks for is what a writer sends. mypy checks each side; here is what it cannot see."""

from __future__ import annotations

import ast
import typing

import pytest

from gangway.wire.console import ConsoleEvent
from gangway.wire.events import READ_BY_AGENT, Event, HostEvent, problem_for_agent
from tests import ROOT
from tests.event_schema import check_event, fields_of, kinds_of

NAMES = {kind for schemas in (HostEvent, ConsoleEvent) for schema in typing.get_args(schemas) for kind in kinds_of(schema)}


def _by_kind(schemas) -> dict[str, type]:
    return {kind: schema for schema in typing.get_args(schemas) for kind in kinds_of(schema)}


def test_an_agent_goes_by_fields_that_a_training_process_sends():
    sent = _by_kind(Event)
    for kind, fields in READ_BY_AGENT.items():
        assert fields <= fields_of(sent[kind]).keys(), kind
        whole = {name: 1 if fields_of(sent[kind])[name][1] is int else "1" for name in fields}
        assert problem_for_agent({"ev": kind, **whole}) == ""
        for name in fields:
            assert problem_for_agent({"ev": kind, **whole, name: []}).startswith(f"{name} = []"), f"{kind}.{name}"


def _names_asked_for():
    """(file and line, name) of each `case` and each comparison of an event's `ev`."""
    for package in ("gangway", "trainers", "cluster", "orchestrator"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                yield from ((f"{path.relative_to(ROOT)}:{node.lineno}", name) for name in _asked_in(node))


def _asked_in(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Match) and _is_kind(node.subject):
        constants = [each for case in node.cases for each in ast.walk(case.pattern) if isinstance(each, ast.Constant)]
    elif isinstance(node, ast.Compare) and _is_kind(node.left):
        constants = [each for side in node.comparators for each in ast.walk(side) if isinstance(each, ast.Constant)]
    else:
        return []
    return [each.value for each in constants]


def _is_kind(node: ast.AST) -> bool:
    """`event["ev"]` or `event.get("ev")`."""
    names = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
    return isinstance(node, ast.Subscript | ast.Call) and names == ["ev"]


def test_readers_ask_for_events_that_there_are():
    asked = list(_names_asked_for())
    assert len({place.partition(":")[0] for place, _ in asked}) >= 6, "the readers were not found"
    assert [(place, name) for place, name in asked if name not in NAMES] == []


@pytest.mark.parametrize(
    ("sender", "event"),
    [
        ("process", {"ev": "saved", "step": 1, "pth": "x"}),
        ("process", {"ev": "saved", "step": 1, "path": "x", "more": 1}),
        ("process", {"ev": "saved", "step": "1", "path": "x"}),
        ("process", {"ev": "svaed", "step": 1, "path": "x"}),
        ("process", {"ev": "exit", "code": 0, "signal": None, "log_tail": [], "pid": 1, "t": 0.0}),
        ("console", {"ev": "status", "message": "no state"}),
    ],
)
def test_a_wrong_event_is_found(sender, event):
    with pytest.raises(AssertionError):
        check_event(event, sender)


def test_every_event_travels_with_time_number_and_generation():
    for kind, schema in _by_kind(HostEvent).items():
        assert {"t", "n", "generation"} <= fields_of(schema).keys(), kind

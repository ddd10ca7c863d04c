"""What a process is asked by its agent, by signals, and by the training itself."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from trainers import runtime
from trainers.runtime.context import MAX_ODD, Runtime


def host_with(*reasons):
    host = Runtime(lambda event: None)
    for reason in reasons:
        host.request_stop(reason)
    return host


def test_a_stop_that_a_training_asked_for_ends_with_that_training():
    host = host_with("requested")
    assert host.stop_reason == "requested"
    host.training_ended()
    assert host.stop_reason is None


@pytest.mark.parametrize("reasons", [("terminated",), ("requested", "terminated"), ("terminated", "requested")])
def test_a_signal_is_for_every_training_of_the_process(reasons):
    host = host_with(*reasons)
    assert host.stop_reason == reasons[0]  # the first stays
    host.training_ended()
    assert host.stop_reason == "terminated"


def test_a_request_to_save_counts_once_and_ends_with_its_training():
    host = Runtime(lambda event: None)
    host.request_save()
    assert [host.take_save_requests(), host.take_save_requests()] == [True, False]
    host.request_save()
    host.training_ended()
    assert not host.take_save_requests()


# ---------------------------------------------------------------------- what a trainer of the user's own reports


class Reason(StrEnum):
    DONE = "done"


class Unreadable:
    """As an array on the devices of other hosts."""

    size, shape = 1, ()

    def tolist(self):
        raise RuntimeError("spans non-addressable devices")


@pytest.mark.parametrize(
    "value",
    [
        np.float32(1.5),
        np.float64(1.5),
        lambda: jnp.float32(1.5),
        lambda: jnp.bfloat16(1.5),
        lambda: jnp.ones((1,)) * 1.5,
        np.array([[1.5]]),
        1.5,
    ],
    ids=lambda value: f"{type(value).__name__} {getattr(value, 'shape', '')}",
)
def test_numbers_of_other_libraries_are_numbers(events, value):
    value = value() if callable(value) else value
    runtime.progress(np.int64(3), {"loss": value}, accuracy=value)
    assert [event["ev"] for event in events] == ["first_step", "metrics"]
    assert events[1]["step"] == 3
    assert type(events[1]["step"]) is int
    assert events[1]["metrics"] == {"loss": 1.5, "accuracy": 1.5}


def test_what_is_no_number_is_reported_once_and_the_rest_goes_on(events):
    for step in (1, 2):
        runtime.progress(step, {"loss": 2.0, "name": "a", "all": jnp.ones(3), "far": Unreadable(), "none": None})
    assert [event["metrics"] for event in events if event["ev"] == "metrics"] == [{"loss": 2.0}] * 2
    told = [event["message"] for event in events if event["ev"] == "note"]
    assert len(told) == 4
    assert told[0].startswith("not passed on: progress(..., name=...): TypeError: str is no number; training goes on")
    assert "far" in told[2]
    assert "spans non-addressable devices" in told[2]


@pytest.mark.parametrize("step", ["3", None, 2.5, np.ones(2), Unreadable(), math.nan, math.inf])
def test_a_step_that_is_none_is_reported(events, step):
    runtime.progress(step, loss=1.0)
    assert [event["ev"] for event in events] == ["note"]
    assert runtime.current().step == 0


def test_a_path_is_text(events):
    runtime.saved(jnp.int32(8), Path("/runs/a/8"))
    assert events[0].items() >= {"ev": "saved", "step": 8, "path": "/runs/a/8"}.items()
    runtime.saved(8, None)
    assert events[1]["message"].startswith("not passed on: saved(8, None): ")


@pytest.mark.parametrize(
    "event",
    [
        {"ev": "heartbeat", "step": "3", "batch_index": 3},
        {"ev": "metrics", "step": 3, "metrics": {"loss": "low"}},
        {"ev": "metrics", "step": 3},
        {"ev": "unheard of"},
        {"ev": None},
        {"ev": "note", "message": object()},
        {"ev": "saved", "step": True, "path": "a"},
        {"ev": "phase", "phase": "train", "t": "now"},
    ],
    ids=lambda event: str(event.get("ev")),
)
def test_an_odd_event_is_reported_and_dropped(events, event):
    runtime.current().emit(event)
    runtime.current().emit(event)
    assert [told["ev"] for told in events] == ["note"]
    assert repr(event["ev"]) in events[0]["message"]


def test_a_sound_event_is_sent_as_json_has_it(events):
    runtime.current().emit({"ev": "done", "step": np.int32(3), "stop_reason": Reason.DONE, "result": {"a": (jnp.ones(2), {1})}})
    assert events[0]["result"] == {"a": [[1.0, 1.0], [1]]}
    assert events[0]["stop_reason"] == "done"


def test_mistakes_without_end_are_not_all_reported(events):
    for number in range(100):
        runtime.progress(1, {chr(1000 + number): "x"})
    assert len([event for event in events if event["ev"] == "note"]) == MAX_ODD

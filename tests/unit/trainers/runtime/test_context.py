"""What a process is asked by its agent, by signals, and by the training itself."""

from __future__ import annotations

import pytest

from trainers.runtime.context import Runtime


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

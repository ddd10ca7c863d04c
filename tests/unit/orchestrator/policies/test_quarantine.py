import pytest

from orchestrator.failures.classify import FailureKind
from orchestrator.failures.history import PastFailure
from orchestrator.policies.quarantine import Quarantine, QuarantinePolicy, quarantined

POLICY = QuarantinePolicy(max_failures_per_host=2, window_s=100.0)
NOW_S = 1000.0
TWO_MACHINES = {0: "a", 1: "b"}
ONE_MACHINE = {0: "a", 1: "a", 2: "a"}


def failed(slot, node, *, times=3, kind=FailureKind.PROCESS_CRASH, at_s=NOW_S - 10):
    return [PastFailure(kind=kind, slot=slot, node_id=node, at_s=at_s)] * times


DEVICE, RUNTIME = FailureKind.DEVICE_ERROR, FailureKind.RUNTIME_ERROR

CASES = {
    "as many as are put up with": (failed(1, "b", times=2), TWO_MACHINES, [], []),
    "one more than that": (failed(1, "b"), TWO_MACHINES, [1], ["b"]),
    "hangs and lost hosts count too": (
        [*failed(1, "b", times=1, kind=FailureKind.HANG), *failed(1, "b", times=2, kind=FailureKind.HOST_LOST)],
        TWO_MACHINES,
        [1],
        ["b"],
    ),
    "one device error is enough": (failed(1, "b", times=1, kind=DEVICE), TWO_MACHINES, [1], ["b"]),
    "a device error long ago": (failed(1, "b", times=1, kind=DEVICE, at_s=NOW_S - 101), TWO_MACHINES, [], []),
    "a device error where no other machine is": (failed(0, "a", times=1, kind=DEVICE), {0: "a"}, [], []),
    "a device error on both machines: both are left": (
        [*failed(0, "a", times=1, kind=DEVICE), *failed(1, "b", times=1, kind=DEVICE)],
        TWO_MACHINES,
        [],
        [],
    ),
    "device errors of different slots of the only machine": (failed(1, "a", times=1, kind=DEVICE), ONE_MACHINE, [1], []),
    "an error of the runtime may come once": (failed(1, "b", times=1, kind=RUNTIME), TWO_MACHINES, [], []),
    "an error of the runtime comes again": (failed(1, "b", times=2, kind=RUNTIME), TWO_MACHINES, [1], ["b"]),
    "what was as long ago as the window counts": (failed(1, "b", at_s=NOW_S - 100), TWO_MACHINES, [1], ["b"]),
    "what was long ago does not count": (failed(1, "b", at_s=NOW_S - 101), TWO_MACHINES, [], []),
    "the user's errors do not count": (failed(1, "b", kind=FailureKind.USER_ERROR), TWO_MACHINES, [], []),
    "preemptions do not count": (failed(1, "b", kind=FailureKind.PREEMPTION), TWO_MACHINES, [], []),
    "nobody was named": ([PastFailure(kind=FailureKind.HANG, at_s=NOW_S)] * 5, TWO_MACHINES, [], []),
    "failures of an older document have no time": (
        [PastFailure(kind=FailureKind.HANG, slot=1, node_id="b")] * 5,
        TWO_MACHINES,
        [],
        [],
    ),
    "all slots of a bad machine": ([*failed(1, "b", times=2), *failed(2, "b", times=1)], {0: "a", 1: "b", 2: "b"}, [1, 2], ["b"]),
    "on the only machine, the slot alone": (failed(1, "a"), ONE_MACHINE, [1], []),
    "on the only machine, beside a slot that has none yet": (failed(1, "a"), {**ONE_MACHINE, 3: None}, [1], []),
    "on the only machine, failures of different slots": (
        [*failed(0, "a", times=2), *failed(1, "a", times=2)],
        ONE_MACHINE,
        [],
        [],
    ),
    "a slot whose machine is not known yet": (failed(1, None), {0: "a", 1: None}, [1], []),
    "a slot that has moved away from the bad machine": (failed(1, "b"), {0: "a", 1: "c"}, [], ["b"]),
    "both machines are bad: the better one is left": ([*failed(0, "a", times=4), *failed(1, "b")], TWO_MACHINES, [0], ["a"]),
    "both machines are as bad: both are left": ([*failed(0, "a"), *failed(1, "b")], TWO_MACHINES, [], []),
    "a slot that is gone": (failed(7, "b"), {0: "a"}, [], ["b"]),
    "a single slot": (failed(0, "a", times=9), {0: "a"}, [], []),
    "no failure at all": ([], TWO_MACHINES, [], []),
    "no slots yet": ([], {}, [], []),
}


@pytest.mark.parametrize("name", CASES)
def test_quarantine(name):
    history, node_of_slot, slots, nodes = CASES[name]
    found = quarantined(history, NOW_S, POLICY, node_of_slot)
    assert (sorted(found.slots), sorted(found.nodes)) == (slots, nodes)


def test_the_reason_names_the_machine_and_how_often():
    assert quarantined(failed(1, "b"), NOW_S, POLICY, {0: "a", 1: "b", 2: "b"}) == Quarantine(
        {
            1: "slot 1 is avoided: node b has failed 3 times in 100 s",
            2: "slot 2 is avoided: node b has failed 3 times in 100 s",
        },
        {"b": "node b has failed 3 times in 100 s"},
    )


def test_the_reason_names_what_its_devices_did():
    history = [*failed(1, "b", times=1, kind=DEVICE), *failed(1, "b", times=1, kind=RUNTIME)]
    assert quarantined(history[:1], NOW_S, POLICY, TWO_MACHINES).nodes == {"b": "node b had 1 device error in 100 s"}
    assert quarantined(history, NOW_S, POLICY, TWO_MACHINES).nodes == {
        "b": "node b had 1 device error and 1 runtime error in 100 s"
    }


def test_more_device_errors_are_put_up_with_on_request():
    policy = QuarantinePolicy(max_failures_per_host=9, max_device_errors_per_host=1)
    for kind, most in ((DEVICE, 1), (RUNTIME, 2)):
        assert not quarantined(failed(1, "b", times=most, kind=kind), NOW_S, policy, TWO_MACHINES).slots
        assert quarantined(failed(1, "b", times=most + 1, kind=kind), NOW_S, policy, TWO_MACHINES).slots


def test_the_window_is_as_long_as_the_policy_says():
    for window_s, slots in ((50.0, []), (200.0, [1])):
        policy = QuarantinePolicy(max_failures_per_host=2, window_s=window_s)
        assert sorted(quarantined(failed(1, "b", at_s=NOW_S - 101), NOW_S, policy, TWO_MACHINES).slots) == slots


def test_where_the_machine_is_not_to_blame_the_slot_is_named():
    reasons = quarantined(failed(1, "a"), NOW_S, POLICY, dict.fromkeys(range(2), "a")).slots
    assert reasons == {1: "slot 1 is avoided: it has failed 3 times in 100 s"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_failures_per_host": 0}, "max_failures_per_host = 0: expected at least 1"),
        ({"max_device_errors_per_host": -1}, "max_device_errors_per_host = -1: expected 0 or more"),
        ({"window_s": 0}, "window_s = 0: expected more than 0"),
    ],
)
def test_policy_rejects(values, message):
    with pytest.raises(ValueError, match=message):
        QuarantinePolicy(**values)


def test_the_least_values_are_taken():
    policy = QuarantinePolicy(max_failures_per_host=1, max_device_errors_per_host=0)
    assert quarantined(failed(1, "b", times=2), NOW_S, policy, TWO_MACHINES).nodes.keys() == {"b"}

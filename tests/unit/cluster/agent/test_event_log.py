"""The log of an agent: what it drops, and what its facts keep whatever it has dropped."""

from __future__ import annotations

from cluster.agent.event_log import MAX_PHASES, EventLog


def told(log, kind, **fields):
    log.append({"t": 1.0, "ev": kind, **fields})


def filled(capacity=20):
    """A generation that has trained for days."""
    log = EventLog(capacity)
    for phase in ("join", "restore", "train"):
        told(log, "phase", phase=phase)
    told(log, "joined")
    told(log, "first_step", step=1)
    for step in range(10, 1000, 10):
        told(log, "saving", step=step)
        told(log, "saved", step=step, path=f"checkpoints/{step}")
        told(log, "evaluating", unit="eval", done=1, total=2)
        for phase in ("evaluate", "train", "a phase of my own"):
            told(log, "phase", phase=phase)
    told(log, "anomaly", restored_step=990, step=1)
    told(log, "notice", reason="SIGTERM", node=False)
    return log


def test_facts_outlive_the_events_and_are_few():
    log = filled()
    for _ in range(200):
        told(log, "phase", phase="train")
    answer = log.answer(0)
    facts = answer["facts"]
    assert [fact["n"] for fact in facts] == sorted(fact["n"] for fact in facts)
    assert answer["missed"] == log.next - len(answer["events"]) > 0
    by_kind = {fact["ev"]: fact for fact in facts}
    assert by_kind["first_step"]["step"] == 1
    assert (by_kind["saved"]["step"], by_kind["anomaly"]["restored_step"]) == (990, 990)
    assert {"joined", "notice", "saving"} <= by_kind.keys()
    phases = [fact["phase"] for fact in facts if fact["ev"] == "phase"]
    assert phases == ["join", "restore", "train", "evaluate", "a phase of my own", "train"]
    assert len(facts) < 20


def test_a_process_that_reports_ever_new_phases_has_few_facts():
    log = filled()
    for number in range(1000):
        told(log, "phase", phase=f"phase {number}")
    phases = [fact["phase"] for fact in log.answer(0)["facts"] if fact["ev"] == "phase"]
    assert (phases[:4], phases[-1]) == (["join", "restore", "train", "evaluate"], "phase 999")
    assert len(phases) == MAX_PHASES + 1


def test_who_has_missed_nothing_gets_no_facts():
    log = filled()
    assert log.answer(log.next) == {"cursor": log.next, "events": []}
    told(log, "note", message="x")
    assert log.answer(log.next - 1).keys() == {"cursor", "events"}


def test_what_says_least_goes_first():
    log = EventLog(8)
    for number in range(4):
        told(log, "metrics", step=number)
        told(log, "evaluating", done=number)
    told(log, "saved", step=1)
    kinds = [event["ev"] for event in log.since(0)]
    assert (kinds.count("metrics"), kinds.count("saved"), kinds.count("evaluating")) == (4, 1, 1)


def test_a_new_generation_begins_without_the_facts_of_the_last():
    log = filled()
    log.clear()
    for _ in range(50):
        told(log, "phase", phase="join")
    assert {fact["ev"] for fact in log.answer(0)["facts"]} == {"phase"}

"""Hosts come and go: the run goes on with what there is, on the same samples in the same order."""

from __future__ import annotations

import json
import re
import signal

import psutil
import pytest

from orchestrator.driver.driver import Driver
from tests.ray.jobs import run_job, settings
from tests.ray.machines import own_ray
from tests.stores.contract import buckets
from tests.strikes import Folder, Striking, checkpoint, recovered, step

WINGS = ("orchestrator/driver", "orchestrator/policies", "cluster/gang", "trainers/checkpoint")

REPLAYED = {}

pytestmark = pytest.mark.slow("trains while hosts come and go")


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    with own_ray(4):
        yield


@pytest.fixture
def in_bucket(monkeypatch):
    """What a job needs whose storage is a bucket: the URL, and the variables of its hosts."""
    with buckets() as stores:
        stores["gs"].set(monkeypatch)
        yield stores["gs"].url(), stores["gs"].environment()


def job(tmp_path, folder, env=(), **changes):
    hosts = {"env": {**folder.env, **dict(env)}, **changes.pop("hosts")}
    return settings(tmp_path, max_num_steps=24, checkpoint={"save_steps": 4}, hosts=hosts, **changes)


def replay(tmp_path, summary, hosts):
    """The summary of an undisturbed run along the lineage of `summary`: one run for all tests that went the same way."""
    way = json.dumps({name: summary[name] for name in ("lineage", "skipped_batches")}), hosts
    if way not in REPLAYED:
        path = tmp_path / "lineage.json"
        path.write_text(way[0])
        about = {"max_num_steps": 24, "checkpoint": {"save_steps": 4}, "driver": {"replay": str(path)}}
        REPLAYED[way] = run_job(settings(tmp_path, name="reference", hosts={"count": hosts}, **about))
    return REPLAYED[way]


def check_equal(summary, reference):
    assert (summary["status"], reference["status"]) == ("finished", "finished")
    assert summary["params_digest"] == reference["params_digest"]
    assert summary["samples_digest"] == reference["samples_digest"]


def test_a_lost_host_is_done_without_and_a_new_one_joins_at_a_checkpoint(tmp_path):
    check_resized(tmp_path)


def test_a_run_in_a_bucket_is_resized_as_one_on_a_disk(tmp_path, in_bucket):
    """Its replay is on a disk: there the same comes of it, bit for bit."""
    url, env = in_bucket
    check_resized(tmp_path, env, storage=url)


def check_resized(tmp_path, env=(), **place):
    folder = Folder(tmp_path / "faults", step_s=1.0)
    shrunk, grown = recovered, recovered
    board = Striking((checkpoint(4), lambda: folder.agent(1).kill()), (shrunk, lambda: None), (grown, folder.full_speed))
    resized = {"hosts": {"min": 2, "max": 3}, "driver": {"elasticity": {"grow": "at_once"}}}
    summary = run_job(job(tmp_path, folder, env, **resized, **place), board)
    assert [(i["kind"], i["action"]) for i in summary["incidents"]] == [("host_lost", "shrink"), ("resize", "grow")]
    assert [stretch["num_hosts"] for stretch in summary["lineage"]] == [3, 2, 3]
    check_equal(summary, replay(tmp_path, summary, hosts=3))


def test_a_gang_that_shrinks_finds_its_programs_compiled(tmp_path):
    folder, programs = Folder(tmp_path / "faults", step_s=0.2), tmp_path / "programs"
    kept = []

    def strike():
        kept.extend(executables(programs))
        folder.agent(0).kill()

    board = Striking((compiled_ahead(2), strike), (recovered, lambda: board.request_stop("requested")))
    made = job(tmp_path, folder, hosts={"min": 2, "max": 3}, driver={"elasticity": {"grow": "never"}})
    made["hosts"]["env"] = {**folder.env, "GANGWAY_PROGRAMS": str(programs)}
    summary = run_job({**made, "max_num_steps": 1000}, board)
    assert board.all_struck
    assert [(i["kind"], i["action"]) for i in summary["incidents"]] == [("host_lost", "shrink")]
    assert len(kept) == 4  # the train step and the fingerprints, on three hosts and on two
    assert executables(programs) == kept


def compiled_ahead(count):
    return lambda event: event["ev"] == "note" and event["message"] == f"compiled ahead for {count} hosts"


def executables(folder):
    return sorted(path.name for path in folder.glob("*.xla") if not path.name.startswith(("eval_step", "preview")))


def test_a_spare_takes_the_place_of_a_lost_host(tmp_path):
    folder = Folder(tmp_path / "faults", step_s=0.1)
    board = Striking((checkpoint(4), lambda: folder.agent(0).kill()))
    summary = run_job(job(tmp_path, folder, hosts={"count": 2, "spares": 1}), board)
    assert [(i["kind"], i["host"], i["action"]) for i in summary["incidents"]] == [("host_lost", 0, "replace")]
    assert len(summary["lineage"]) == 1
    check_equal(summary, replay(tmp_path, summary, hosts=2))


def test_a_spare_takes_the_place_of_a_host_whose_device_fails(tmp_path):
    folder = Folder(tmp_path / "faults")
    folder.order(1, "device_error", at=6)
    summary = run_job(job(tmp_path, folder, hosts={"count": 2, "spares": 1}))
    (incident,) = summary["incidents"]
    assert (incident["kind"], incident["host"], incident["action"]) == ("device_error", 1, "replace")
    assert incident["detail"] == "slot 1 is avoided: it had 1 device error in 3600 s"
    assert incident["evidence"]["summary"].startswith("host 1: a device failed at step ")
    assert len(summary["lineage"]) == 1
    check_equal(summary, replay(tmp_path, summary, hosts=2))


def test_a_process_that_is_reported_to_end_loses_no_step(tmp_path):
    folder = Folder(tmp_path / "faults", step_s=0.1)
    board = Striking((step(6), lambda: folder.process(1).send_signal(signal.SIGTERM)))
    summary = run_job(job(tmp_path, folder, hosts={"count": 2}), board)
    (incident,) = summary["incidents"]
    assert incident["kind"] == "preemption"
    assert incident["resumed_step"] == incident["step"]
    assert summary["goodput"]["replay"] == 0.0
    check_equal(summary, replay(tmp_path, summary, hosts=2))


def test_a_host_that_is_lost_while_the_gang_stops_is_named(tmp_path, monkeypatch):
    """All hosts have saved and said so; then an agent dies, before the next generation."""
    real = Driver._halt

    def halt(self, generation):
        if generation.finished:
            agent = psutil.Process(self.membership.gang.descriptions[0]["pid"])
            agent.kill()
            agent.wait()
        return real(self, generation)

    monkeypatch.setattr(Driver, "_halt", halt)
    folder = Folder(tmp_path / "faults", step_s=0.1)
    board = Striking((step(6), lambda: folder.process(1).send_signal(signal.SIGTERM)))
    summary = run_job(job(tmp_path, folder, hosts={"count": 2}), board)
    (incident,) = summary["incidents"]
    assert (incident["kind"], incident["host"], incident["action"]) == ("host_lost", 0, "replace")
    said = incident["evidence"]["summary"]
    assert re.fullmatch(r"saved and stopped at step \d+ \(host 1: SIGTERM\); then host 0: its agent is gone.*", said), said
    assert incident["resumed_step"] == incident["step"]
    check_equal(summary, replay(tmp_path, summary, hosts=2))


def test_two_losses_one_after_the_other(tmp_path):
    folder = Folder(tmp_path / "faults", step_s=0.1)
    board = Striking(
        (checkpoint(4), lambda: folder.process(0).kill()),
        (recovered, lambda: folder.agent(1).kill()),
    )
    summary = run_job(job(tmp_path, folder, hosts={"count": 2, "spares": 1}), board)
    assert board.all_struck
    assert [i["kind"] for i in summary["incidents"]] == ["process_crash", "host_lost"]
    check_equal(summary, replay(tmp_path, summary, hosts=2))

"""What the fault laboratory reads and damages of a run in a bucket."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest

from gangway.storage import ours
from gangway.storage.opening import place_of
from gangway.storage.row import Kept, Row, WriterTerm
from orchestrator.config.job import load
from orchestrator.faultlab.chaos import command as chaos
from orchestrator.faultlab.chaos import injectors
from orchestrator.faultlab.chaos.faults import KINDS
from orchestrator.faultlab.chaos.injectors import Fault
from orchestrator.faultlab.chaos.score import unfinished_files
from orchestrator.faultlab.testbed import live_run
from orchestrator.faultlab.testbed.live_run import Run, RunError, step_of
from orchestrator.faultlab.verify import command as verify
from tests import ROOT
from trainers.checkpoint import layout

TINY = str(ROOT / "configs" / "tiny.yaml")


@pytest.fixture
def bucket(stores, monkeypatch):
    stores["gs"].set(monkeypatch)
    layout._rows.clear()
    return place_of(stores["gs"].url())


@pytest.fixture
def saved(bucket):
    """Commits a checkpoint of a step in the run `run`."""
    run = bucket / "run"
    row = Row(run / "row")
    term = WriterTerm(row.take_over({"hostname": "here"}).term.driver_term, 0)

    def save(step):
        folder = layout.name_for(step, term, f"{step:08x}")
        (run / "checkpoints" / folder / "state" / "empty").put(b"")
        (run / "checkpoints" / folder / "state" / "d" / "0").put(bytes(range(200)))
        row.commit(term, step, Kept(folder, ""))
        return run / "checkpoints" / folder

    return save


def test_checkpoints_of_a_bucket_have_their_steps_and_count_from_when_they_were_seen(bucket, saved, tmp_path, monkeypatch):
    now = {"s": 100.0}
    monkeypatch.setattr(live_run, "time", SimpleNamespace(time=lambda: now["s"]))
    run = Run(TINY, [], (bucket / "run").url, tmp_path)
    assert (run.checkpoints(), run.saved_after(0.0)) == ([], False)
    saved(100)
    saved(20)
    assert [step_of(path) for path in run.checkpoints()] == [20, 100]
    now["s"] = 200.0
    saved(60)  # complete by then, if nobody has looked
    at_s = run.now_s()
    now["s"] = 300.0
    assert (run.saved_after(at_s), run.saved_after(50.0)) == (False, True)
    saved(120)
    assert run.saved_after(at_s)


def test_a_run_of_that_name_and_a_folder_that_is_no_verify_of_before_are_in_the_way(bucket, tmp_path):
    (bucket / "tiny" / "launch.json").put(b"{}")
    with pytest.raises(RunError, match=r"gs://.*/tiny holds a run already"):
        Run(TINY, [], (bucket / "tiny").url, tmp_path)
    config = load(TINY, [f"storage={bucket.url}"])
    line, override = chaos.fresh_name(config)
    assert (line.rpartition(": ")[2], override) == ("this one is tiny-2", "name=tiny-2")
    (bucket / "tiny-verify" / "notes.txt").put(b"a user's")
    with pytest.raises(RunError, match=r"gs://.*/tiny-verify is in the way, and not of an earlier verify"):
        verify.Trial(verify.parse([TINY, f"storage={bucket.url}"]), None)
    (bucket / "tiny-verify" / "verify.json").put(b"{}")
    trial = verify.Trial(verify.parse([TINY, f"storage={bucket.url}"]), None)
    assert [entry.name for entry in (bucket / "tiny-verify").list()] == ["verify.json"]
    for name in ("undisturbed/row/1", "again/summary.json", "a-users/file"):
        (bucket / "tiny-verify" / name).put(b"")
    trial.remove_runs()
    assert [entry.name for entry in (bucket / "tiny-verify").list()] == ["a-users/file", "verify.json"]
    with pytest.raises(ours.NotOursError):
        verify.delete(bucket / "tiny-verify" / "a-users", verify.RUN)


@pytest.mark.parametrize(("damage", "size"), [(injectors.flip_byte, 200), (injectors.truncate_checkpoint, None)])
def test_the_newest_checkpoint_is_damaged_in_place(bucket, saved, tmp_path, monkeypatch, damage, size):
    old, new = saved(20), saved(40)
    run = Run(TINY, [], (bucket / "run").url, tmp_path)
    monkeypatch.setattr(run, "member", lambda host: SimpleNamespace(pid=1))
    monkeypatch.setattr(injectors.os, "kill", lambda pid, number: None)
    details = damage(injectors.Testbed(run), Fault("flip", 0, 0.0, salt=7))
    assert (details["checkpoint"], details["file"]) == (40, "state/d/0")
    whole = bytes(range(200))
    assert (old / "state/d/0").get() == whole != (new / "state/d/0").get()
    assert size is None or len((new / "state/d/0").get()) == size
    assert injectors.pick_file(new, random.Random(1)) == "state/d/0"


def test_what_no_run_may_leave_in_a_bucket_is_named(bucket, saved):
    saved(20)
    run = bucket / "run"
    assert unfinished_files(run) == []
    (run / "checkpoints" / "40-1_0_0c9e41aa" / "state" / "d").put(b"")
    (run / ".probe-0a").put(b"")
    assert unfinished_files(run) == ["a checkpoint that no record names: 40-1_0_0c9e41aa", "file .probe-0a"]


def test_kinds_that_need_a_disk_are_refused_by_name_and_no_others():
    config = load(TINY, ["storage=gs://bucket/runs"])
    refused = {kind: why for kind in KINDS if (why := chaos.why_no_such_storage(KINDS[kind].needs.split(), config))}
    assert sorted(refused) == ["disk_full", "disk_full_at_end", "planted_link", "storage_hang", "storage_hang_kill", "vanish"]
    assert refused["vanish"] == "it needs a folder that can be renamed, and the storage is a bucket; set storage=PATH"
    assert refused["disk_full"] == "it needs a disk of its own, and the storage is a bucket; set storage=PATH"


def test_the_console_of_chaos_is_kept_in_the_bucket(bucket):
    with chaos.work_folder((bucket / "tiny").url) as folder:
        (folder / "console.log").write_text("said")
    assert (bucket / "tiny-chaos" / "console.log").get() == b"said"
    assert not folder.exists()


def test_the_evidence_of_a_run_is_read_from_its_bucket(bucket, saved, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (saved(4) / "meta.json").put(json.dumps({"fingerprints": {"w": "1f"}}).encode())
    saved(8)
    run = Run(TINY, [], (bucket / "run").url, tmp_path / "work")
    run.record_batches()
    (bucket / "run" / "summary.json").put(b'{"status": "finished"}')
    run.tracking().mkdir(parents=True)
    (run.tracking() / "metrics.jsonl").write_text('{"step": 4, "metrics": {"loss": 2.0}}\n')
    found = verify.read_evidence(run, 8)
    assert (found.fingerprints, found.losses, found.summary) == ({4: {"w": "1f"}}, {4: 2.0}, {"status": "finished"})

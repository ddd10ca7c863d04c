"""What a run keeps in a bucket beside its checkpoints: lines as objects, requests, metrics in segments, stacks, an identity."""

import json
import os
import shutil
from pathlib import Path

import pytest

from gangway.errors import CheckpointUnavailableError
from gangway.storage import documents, identity, object_store, opening
from gangway.storage.documents import DocumentKind
from gangway.storage.opening import place_of
from orchestrator.driver import halt
from orchestrator.report import child
from orchestrator.run_state import lines, requests
from orchestrator.run_state.launch import open_launch
from orchestrator.run_state.run_folder import RunFolder
from orchestrator.tracking import of_bucket
from orchestrator.tracking.config import TrackingConfig
from orchestrator.tracking.tracker import Tracker
from tests.stores.fault_proxy import Fault
from trainers.checkpoint import assets
from trainers.loop.record import Record
from trainers.recorders.recorder import About


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    yield
    assert not [name for name in os.listdir(tmp_path) if ":" in name], "a URL was taken for a path"


@pytest.fixture
def run(stores, monkeypatch):
    stores["gs"].set(monkeypatch)
    return f"{stores['gs'].url()}/run"


def test_lines_that_are_appended_are_read_back_in_order(run, monkeypatch):
    folder = RunFolder(run)
    assert folder.last_lines("incidents.jsonl") == []
    for number in range(5):
        folder.append("incidents.jsonl", f"{number}\nand {number}\n")
    assert folder.last_lines("incidents.jsonl") == [line for n in range(5) for line in (str(n), f"and {n}")]
    monkeypatch.setattr("orchestrator.run_state.run_folder.READ_BYTES", 20)
    assert folder.last_lines("incidents.jsonl") == ["3", "and 3", "4", "and 4"]


def test_a_request_is_taken_once(run):
    path = requests.send(run, requests.STOP, "launch")
    requests.send(run, requests.SAVE, "an earlier one")
    place_of(f"{run}/requests/notes.txt").put(b"a user's")
    assert requests.is_waiting(path)
    assert [request.kind for request in requests.take(run, "launch")] == ["stop"]
    assert requests.take(run, "launch") == []
    assert not requests.is_waiting(path)
    assert [entry.name for entry in place_of(f"{run}/requests").list()] == ["notes.txt"]


def test_a_run_keeps_its_identity_when_it_is_moved_and_a_copy_gets_its_own(run):
    first = identity.of(run)
    assert identity.of(run) == first == (first.id, ())
    moved = f"{run}-moved"
    place_of(f"{moved}/run.json").put(place_of(f"{run}/run.json").get())
    copy = identity.of(moved)
    assert copy.id != first.id
    assert copy.notes[0].startswith(f"{moved} is a copy of {run}, which is still there: from here on it is a run of its own")
    place_of(f"{run}-again/run.json").put(place_of(f"{run}/run.json").get())
    place_of(f"{run}/run.json").store.delete(place_of(f"{run}/run.json").key)
    assert identity.of(f"{run}-again") == (first.id, ())
    place_of(f"{run}/run.json").put(b"{")
    assert "run.json: damaged" in identity.of(run).notes[0]


def test_a_newest_checkpoint_that_is_deleted_in_a_bucket_is_reported_within_a_minute(run):
    """The two clocks are far apart, as they are on a machine."""
    now = {"s": 100.0}
    tracking = TrackingConfig(mlflow=False)
    opened = open_launch(run, "launch", 1.7e9, tracking, {}, lambda: 1.7e9 + now["s"], monotonic=lambda: now["s"])
    try:
        checkpoint = place_of(f"{run}/checkpoints/40-1_0_0c9e41aa/meta.json")
        checkpoint.put(b"{}")
        opened.saved(40, checkpoint.parent.url)
        checkpoint.store.delete(checkpoint.key)
        now["s"] += 30
        opened.store()
        assert opened.flush(30)
        assert not opened.checkpoint_is_gone(), "each look is paid for"
        now["s"] += 31
        opened.store()
        assert opened.flush(30)
        assert [opened.checkpoint_is_gone() for _ in range(2)] == [True, False]
    finally:
        opened.close("FINISHED", 30.0)


def test_metrics_are_here_and_their_segments_in_the_bucket(run):
    tracker = Tracker(run, TrackingConfig(mlflow=False), "run")
    tracker.log_metrics(1, {"loss": 2.0})
    tracker.log_artifact(documents.join(run, "summary.json"))
    assert tracker.close() is None
    here = Path(identity.local_folder(run), "tracking", "metrics.jsonl")
    assert here.is_relative_to(Path(os.environ["HOME"], ".gangway", "runs"))
    lines = here.read_bytes()
    assert [json.loads(line).get("artifact") for line in lines.splitlines()][2] == documents.join(run, "summary.json")
    segments = of_bucket.segments_of(run)
    assert b"".join((segments / name).get() for name, _ in of_bucket.in_order(segments)) == lines
    # A driver on another machine goes on with all of it.
    shutil.rmtree(os.environ["HOME"])
    second = Tracker(run, TrackingConfig(mlflow=False), "run")
    second.log_metrics(2, {"loss": 1.0})
    second.close()
    assert here.read_bytes().startswith(lines)
    assert sum(size for _, size in of_bucket.in_order(segments)) == len(here.read_bytes())


def test_segments_that_cannot_be_copied_are_reported_and_copied_later(run, stores, tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "LIMITS", object_store.Limits(1.0, 0.05, 0.01, 0.02))
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"a": 1}\n{"unfinished')
    segments = of_bucket.Segments(run, str(file), every_s=1000.0)
    stores["gs"].proxy.faults[:] = [Fault("^PUT", "503")]
    segments._attempt(segments.copy)
    assert segments.problem.startswith(f"metrics are not copied to {run}/tracking: ")
    stores["gs"].proxy.faults.clear()
    segments.close(10.0)
    assert segments.problem is None
    (name, size), *others = of_bucket.in_order(of_bucket.segments_of(run))
    assert (name[:24], size, others) == ("00000000-000000000000000", 9, [])


def test_segments_of_a_driver_that_was_overtaken_hide_nothing_of_its_successor(run):
    """The first one is of term 1, which wakes up after the second has written, as far as it had got before and further."""
    place = of_bucket.segments_of(run)
    for term, offset, text in ((1, 0, "aa"), (2, 3, "bb"), (1, 3, "xx"), (1, 6, "yyyyy"), (2, 6, "cc"), (2, 99, "dd")):
        (place / of_bucket.name_for(term, offset)).put(f"{text}\n".encode())
    of_bucket.fetch(run)
    assert Path(identity.local_folder(run), "tracking", "metrics.jsonl").read_text() == "aa\nbb\ncc\n"


def test_a_machine_that_drives_a_run_again_has_what_another_one_has_written_meanwhile(run, monkeypatch, tmp_path):
    def drive(home, term, *values):
        monkeypatch.setenv("HOME", str(tmp_path / home))
        tracker = Tracker(run, TrackingConfig(mlflow=False), "run", driver_term=term)
        for step, value in values:
            tracker.log_metrics(step, {"loss": value})
        return tracker

    first = drive("a", 1, (1, 5.0))
    first._segments.copy()
    first.log_metrics(2, {"a line that is longer than all that the other machine writes": 4.0})
    first.log_metrics(3, {"and it is never copied": 3.0})
    drive("b", 2, (2, 4.5)).close()
    drive("a", 3, (4, 2.0)).close()
    found = [json.loads(line) for line in lines.metrics(place_of(run))]
    assert [(line["step"], line["metrics"]) for line in found if "metrics" in line] == [
        (1, {"loss": 5.0}),
        (2, {"loss": 4.5}),
        (4, {"loss": 2.0}),
    ]


def test_lines_are_in_the_order_of_drivers_and_not_of_their_clocks(run):
    old, new = RunFolder(run, 1), RunFolder(run, 2)
    for folder, text in ((old, "1\n"), (new, "3\n"), (old, "2\n"), (new, "4\n")):
        folder.append("incidents.jsonl", text)
    assert new.last_lines("incidents.jsonl") == ["1", "2", "3", "4"]


def test_lines_of_a_plain_copy_on_a_disk_are_read_and_go_on(run, tmp_path):
    tracker = Tracker(run, TrackingConfig(mlflow=False), "run")
    tracker.log_metrics(1, {"loss": 2.0})
    tracker.close()
    RunFolder(run).append("incidents.jsonl", "1\n")
    place, copy = place_of(run), tmp_path / "copy"
    for entry in place.list():
        (copy / entry.name).parent.mkdir(parents=True, exist_ok=True)
        (copy / entry.name).write_bytes((place / entry.name).get())
    assert [b"loss" in line for line in lines.metrics(place_of(copy))].count(True) == 1
    here = Tracker(str(copy), TrackingConfig(mlflow=False), "run")
    here.log_metrics(2, {"loss": 1.0})
    here.close()
    assert [b"loss" in line for line in lines.metrics(place_of(copy))].count(True) == 2
    folder = RunFolder(str(copy))
    folder.append("incidents.jsonl", "2\n")
    assert folder.last_lines("incidents.jsonl") == ["1", "2"]
    assert list(lines.of(place_of(copy) / "incidents.jsonl")) == [b"1", b"2"]
    assert identity.of(copy).id != identity.of(run).id, "the run in the bucket is still there"


def test_stacks_are_kept_of_the_newest_incidents(run, monkeypatch):
    monkeypatch.setattr(halt, "KEPT_STACKS", 2)
    for number in range(4):
        halt.write_stacks(halt.stacks_folder(run, number), {0: "stack", 1: "other"})
    incidents = place_of(f"{run}/incidents")
    assert incidents.folders() == ["0002", "0003"]
    assert (incidents / "0003/host-0001.txt").get() == b"other"


RECORD = Record(DocumentKind("init_from.json", dict, "it is chosen anew"), "init_from")


def test_what_a_run_began_with_is_recorded(run, stores, monkeypatch):
    assert RECORD.read(run) is None
    RECORD.write(run, {"path": "a"})
    assert RECORD.read(run) == {"path": "a"}
    monkeypatch.setattr(opening, "LIMITS", object_store.Limits(1.0, 0.05, 0.01, 0.02))
    stores["gs"].proxy.faults[:] = [Fault("^GET", "503")]
    with pytest.raises(CheckpointUnavailableError):
        RECORD.read(run)


def test_assets_are_uploaded(run):
    assets.keep(run, {"labels": ["a"], "text": "b"})
    assert [entry.name for entry in place_of(f"{run}/assets").list()] == ["assets.json", "labels", "text"]


def test_what_a_recorder_writes_lies_in_a_folder_of_this_machine(run):
    folder = About("run", run, {}).output_folder()
    assert str(folder) == identity.local_folder(run)
    assert str(folder).startswith(os.environ["HOME"])


def test_a_copy_of_a_run_has_the_form_of_one_on_a_disk(run, tmp_path):
    RunFolder(run).append("timeline.jsonl", "1\n")
    RunFolder(run).append("timeline.jsonl", "2\n")
    for name in ("launch.json", "checkpoints/8-1_0_00000000/meta.json", "row/00000001.json", "previews/8.json"):
        place_of(f"{run}/{name}").put(b"{}")
    child.fetch_from_bucket(run, tmp_path / "copy")
    found = sorted(str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*") if path.is_file())
    assert found == ["launch.json", "previews/8.json", "timeline.jsonl", "tracking/metrics.jsonl"]
    assert (tmp_path / "copy" / "timeline.jsonl").read_text() == "1\n2\n"

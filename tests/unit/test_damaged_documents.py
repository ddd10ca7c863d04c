"""Damage at random in every document of a run, of its checkpoints and of its kept programs.

A start reads all of them. It never ends with a traceback, and never goes on as if nothing had been: it knows what it knew before
the damage, or it says the name of the document.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from gangway.errors import CheckpointError, CheckpointUnavailableError, UsageError
from gangway.storage import documents, json_text
from gangway.storage.opening import place_of
from gangway.storage.row import Kept, WriterTerm
from orchestrator.failures.classify import FailureKind
from orchestrator.failures.history import PastFailure
from orchestrator.run_state import outcome, replay, summary
from orchestrator.run_state.incidents import Incident
from orchestrator.run_state.launch import Launch
from orchestrator.run_state.lease import RunInUse, Time, acquire, check_free
from orchestrator.run_state.replay import ReplayError
from orchestrator.run_state.run_folder import RunFolder
from orchestrator.run_state.storage_writer import Writer
from orchestrator.run_state.versions import check_versions
from orchestrator.tracking import mlflow_shipper, spool
from orchestrator.tracking import tracker as tracking
from orchestrator.tracking.config import TrackingConfig
from tests import fuzz
from trainers import runtime
from trainers.checkpoint import assets, layout, manifest
from trainers.loop import frozen, init_from, lineage, start_from
from trainers.recorders import jsonl
from trainers.recorders.recorder import About
from trainers.runtime import executable_files
from trainers.runtime.executable_files import DamagedProgramError

REFUSED = (
    documents.StorageError,
    CheckpointError,
    CheckpointUnavailableError,
    UsageError,
    ReplayError,
    RunInUse,
    manifest.DamagedError,
    DamagedProgramError,
)
"""Errors that a command shows as one line."""
CASES = 100
NAME = "8-1_0_00000000"


class World:
    """The clock of the starts: a wait costs nothing."""

    now_s = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    @property
    def times(self) -> Time:
        return Time(wall=lambda: self.now_s, passed=lambda: self.now_s, sleep=self.sleep)


def driver_of(folder: Path, told: list[str], launch_id: str = "launch") -> Launch:
    world = World()
    lease = acquire(str(folder), launch_id, world.times, waiting=told.append)
    tracker = tracking.Tracker(str(folder), TrackingConfig(), "run", clock=world.times.wall)
    clock = world.times.wall
    return Launch(RunFolder(str(folder)), launch_id, 1000.0, lease, threading.Event(), tracker, clock, Writer(), monotonic=clock)


@pytest.fixture(scope="module")
def quiet():
    """Nothing is shipped, and nothing waits for the disk or for another writer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracking, "ShipperProcess", lambda run_dir, uri: None)
        patch.setattr("os.fsync", lambda descriptor: None)
        patch.setattr("gangway.storage.documents.PAUSES_S", ())
        patch.setattr("gangway.storage.row.READS", 0)  # a record that is damaged here stays so
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory, quiet) -> Path:
    """A run with each of its documents."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    folder.mkdir()
    driver = driver_of(folder, [])
    driver.formed({"address": "a:1", "gang": {"slots": []}, "generation": 0, "high_water_step": 12, "began_at_s": 1001.0})
    driver.progress.high_water_step = 12
    driver.progress.seen = {0: 7, 1: 5}
    driver.saved(8, str(folder / "checkpoints" / NAME))
    past = PastFailure(kind=FailureKind.HOST_LOST, step=9, exception=("ValueError", "x"), generation=0)
    for step in (9, 11):
        driver.failed(past, Incident(kind="crash", host=1, generation=0, step=step, failed_at_s=1002.0))
    driver.publish(8, {"loss": 2.0})
    driver.preview({"step": 8, "previews": [{"prompt": "a", "text": "b"}]}, print)
    assert driver.flush(30.0)
    driver._writer.stop()
    driver.lease.release()
    spool.STATE_KIND.write(
        folder / "tracking" / "shipped.json", {"offset": 10, "last_step": {"loss": 8}, "rejected": 0, "run_id": "r"}
    )
    outcome.write_outcome(folder, {"launch_id": "launch", "status": "failed", "stop_reason": None, "error": "no"})
    summary.write(str(folder), {"lineage": [{"batch_index": 0, "num_hosts": 2}], "skipped_batches": [3]})
    (folder / "checkpoints" / NAME / "state").mkdir(parents=True)
    checkpoint = folder / "checkpoints" / NAME
    meta = {"shapes": {".params['w']": "float32[2]"}, "step": 8, "batch_index": 8, "arguments": {"name": "run"}}
    (checkpoint / "meta.json").write_text(json_text.seal({"format": manifest.FORMAT, **meta}))
    files = {name: manifest.digest(place_of(checkpoint / name)) for name in manifest.names_below(place_of(checkpoint))}
    digest = manifest.write(place_of(checkpoint), manifest.Manifest(8, 1000.0, files))
    driver.lease._row.commit(WriterTerm(driver.lease.driver_term), 8, Kept(NAME, digest))
    lineage.write_skipped(str(folder), [3])
    for record in (init_from.RECORD, start_from.RECORD):
        record.write(str(folder), {"path": "a", "checkpoint": "b", "digest": "c"})
    frozen.RECORD.write(str(folder), {"base": {"path": "a", "checkpoint": "b", "digest": "c"}})
    assets.keep(str(folder), {"labels": ["a", "b"], "text": "c"})
    recorder = jsonl.JsonLines(About("run", str(folder), {}))
    recorder.record(8, {"loss": 2.0}, {})
    recorder.close()
    programs = folder / "programs"
    programs.mkdir()
    executable_files.write_pointer(programs / "step.json", programs / "step.xla")
    # Not a copy, but the run itself, moved: another one has another identity.
    return folder.rename(folder.with_name("kept"))


def places(folder: Path) -> list[Path]:
    """All documents of the run, found by their names: a new one is among them at once."""
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.suffix in (".json", ".jsonl"))


# ---------------------------------------------------------------------- a start


def start(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Reads all documents as a start does. Returns what it knows then, and what it says."""
    facts: dict[str, Any] = {}
    told: list[str] = []
    runtime.install(runtime.Runtime(lambda event: told.append(str(event.get("message")))))

    def attempt(name: str, work: Any) -> None:
        try:
            facts[name] = work()
        except REFUSED as error:
            told.append(str(error))

    checkpoint = folder / "checkpoints" / NAME
    attempt("versions", lambda: check_versions(str(folder)))
    attempt("free", lambda: check_free(str(folder)))
    attempt("outcome", lambda: outcome.read_outcome(folder, "launch"))
    attempt("outcome aside", lambda: told.append(outcome.set_damaged_aside(folder) or ""))
    place = place_of(folder) / "checkpoints"
    attempt("committed", lambda: layout.check(place, layout.row_of(place).newest(), 8))
    attempt("steps", lambda: layout.steps(place))
    attempt("manifest", lambda: manifest.read(place_of(checkpoint)))
    attempt("meta", lambda: manifest.read_meta(place_of(checkpoint)))
    attempt("skipped", lambda: lineage.read_skipped(str(folder)))
    for record in (init_from.RECORD, start_from.RECORD, frozen.RECORD):
        attempt(record.kind.name, lambda record=record: record.read(str(folder)))
    attempt("assets", lambda: assets.read(str(folder)))
    attempt("replay", lambda: replay.read(str(folder / "summary.json")))
    attempt("program", lambda: executable_files.read_pointer(folder / "programs" / "step.json").name)
    attempt("recorded", lambda: jsonl.JsonLines(About("run", str(folder), {})).close())
    attempt("driver", lambda: known_to_driver(folder, told))
    attempt("shipper", lambda: ship(folder))
    return facts, told


def known_to_driver(folder: Path, told: list[str]) -> dict[str, Any]:
    driver = driver_of(folder, told)
    told += driver.problems
    known = {
        name: getattr(driver.progress, name)
        for name in (
            "saved_path",
            "checkpoint_step",
            "committed_step",
            "generations",
            "drivers",
            "high_water_step",
            "gang",
            "seen",
            "history",
        )
    }
    known["saved_path"] = known["saved_path"] and Path(known["saved_path"]).name
    known["steps of incidents"] = [incident.step for incident in driver.progress.incidents]
    driver.tracker.log_metrics(9, {"loss": 1.0})
    driver.store()
    assert driver.flush(30.0), driver.storage_problem
    driver._writer.stop()
    driver.lease.release()
    driver.tracker._spool.close()
    return known


def ship(folder: Path) -> int:
    shipper = mlflow_shipper.Shipper(str(folder / "tracking"), threading.Event())
    lines = mlflow_shipper.read_lines(str(folder / "tracking" / "metrics.jsonl"), shipper._state.offset)
    for line in lines:
        if line.record is not None:
            mlflow_shipper.fresh_values([line], {}) if "metrics" in line.record else None
    tracking.left_over(str(folder / "tracking"))
    return shipper._state.offset


# ---------------------------------------------------------------------- damage


def flip(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def change_a_key(data: bytes, rng: random.Random, *, add: bool) -> bytes:
    document = json.loads(data.splitlines()[0] if data.startswith(b'{"') and data.count(b"\n") > 1 else data)
    if add:
        document["unheard_of"] = rng.random()
    else:
        del document[rng.choice(sorted(document))]
    return json.dumps(document).encode()


DAMAGES: dict[str, Any] = {
    "flipped": flip,
    "truncated": lambda data, rng: data[: rng.randrange(len(data))],
    "zeros": lambda data, rng: bytes(len(data)),
    "zeros at the end": lambda data, rng: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "empty": lambda data, rng: b"",
    "folder": None,
    "pipe": None,
    "other JSON": lambda data, rng: rng.choice(
        [b"[]", b"null", b"3", b'"a"', b"{}", b'{"format": 1}', b"[" * 100_000, b"9" * 5000]
    ),
    "no text": lambda data, rng: bytes(rng.randrange(128, 256) for _ in range(50)),
    "another key": lambda data, rng: change_a_key(data, rng, add=True),
    "a key less": lambda data, rng: change_a_key(data, rng, add=False),
}
OF_LINES = ("incidents.jsonl", "metrics.jsonl")


def damage(path: Path, how: str, rng: random.Random) -> None:
    if how in ("folder", "pipe"):
        path.unlink()
        path.mkdir() if how == "folder" else os.mkfifo(path)
    else:
        path.write_bytes(DAMAGES[how](path.read_bytes(), rng))


def restore(whole: Path, work: Path) -> None:
    """Makes `work` the same as `whole` again. What is the same stays: a disk takes longer to delete a folder than to read it."""
    for path in sorted(work.rglob("*"), reverse=True):
        kept = whole / path.relative_to(work)
        if path.is_dir() and not path.is_symlink():
            if not kept.is_dir():
                path.rmdir()
        elif not (path.is_file() and kept.is_file() and path.read_bytes() == kept.read_bytes()):
            path.unlink()
    shutil.copytree(whole, work, dirs_exist_ok=True, copy_function=copy_if_missing)


def copy_if_missing(source: str, target: str) -> None:
    if not os.path.exists(target):
        shutil.copyfile(source, target)


def check(whole: Path, work: Path, seed: int) -> None:
    rng = random.Random(seed)
    restore(whole, work)
    place, how = rng.choice(places(work)), rng.choice(sorted(DAMAGES))
    damage(work / place, how, rng)
    case = f"seed {seed}: {place}: {how}"
    try:
        facts, told = start(work)
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    if facts != KNOWN[0] and place.name not in OF_LINES[1:]:
        assert any(place.name in line or place.stem in line for line in told), f"{case}: in silence: {facts} {told}"
    if seed < CASES or seed % 4 == 0:  # a start costs as much as all else
        # What was set aside or written again does no harm any more: the next start is that of a run.
        start(work)


KNOWN: list[dict[str, Any]] = []


@pytest.fixture(scope="module")
def copied(whole, tmp_path_factory):
    """What an undamaged copy knows."""
    work = tmp_path_factory.mktemp("work") / "run"
    shutil.copytree(whole, work)
    KNOWN[:] = [start(work)[0]]
    assert {"driver", "meta", "shipper", "program"} <= KNOWN[0].keys()
    assert KNOWN[0]["driver"]["steps of incidents"] == [9, 11]
    return work


def test_a_damaged_document_is_reported_and_never_a_traceback(whole, copied):
    for seed in range(CASES):
        check(whole, copied, seed)


@pytest.mark.slow("many damages; `make fuzz KIND=documents` has more")
def test_no_damage_of_many_passes_in_silence(whole, copied):
    for number in range(fuzz.count(200)):
        check(whole, copied, fuzz.seed(10) * 1000 + number)


def test_each_document_has_a_format_and_a_digest(whole):
    for place in places(whole):
        if place.name == "metrics.jsonl":
            continue  # numbers, line by line
        for text in (whole / place).read_text().splitlines() if place.suffix == ".jsonl" else [(whole / place).read_text()]:
            document = json.loads(text)
            assert isinstance(document.get("format"), int), place
            assert json_text.is_whole(document), place


def test_a_document_of_a_newer_program_is_refused_by_name(whole, copied):
    for place in places(whole):
        # Of the row the newest record is read: it repeats what those before it say.
        if place.name in ("metrics.jsonl", "00000001.json") or place.parts[0] == "previews":
            continue
        restore(whole, copied)
        path = copied / place
        lines = path.read_text().splitlines() if place.suffix == ".jsonl" else [path.read_text()]
        newer = [json.loads(line) for line in lines]
        newer = [{key: value for key, value in document.items() if key != "digest"} | {"format": 99} for document in newer]
        path.write_text("".join(json_text.seal(document, None if place.suffix == ".jsonl" else 1) for document in newer))
        told = start(copied)[1]
        assert any(place.name in line and "newer gangway" in line and "99" in line for line in told), (place, told)
        assert path.exists(), "what a newer program wrote is kept"

"""Nothing is written through a link that somebody else has planted: read from the sources, as `test_deletions` does."""

import ast
import os
import re
from contextlib import suppress

import pytest

from gangway.storage import durable, local_store, ours
from gangway.storage.opening import place_of, place_of_run
from gangway.storage.store import StorageProblem
from orchestrator.commands import checkpoints
from orchestrator.driver import halt
from orchestrator.report import page, record
from orchestrator.report.__main__ import write as write_report
from orchestrator.run_state import fresh, lease, requests
from orchestrator.run_state.launch import PREVIEWS_KIND
from orchestrator.run_state.run_folder import RunFolder
from orchestrator.tracking.config import TrackingConfig
from orchestrator.tracking.tracker import Tracker
from tests import PACKAGES, ROOT
from tests.imports import sources
from tests.programs import checkpointing

NEW_FOLDER = "it writes into a folder with a random name that it has just created"
OWN_MACHINE = "it writes into a folder of a test bed, or of an injected fault, that this user has made"
OTHERWISE = {
    "orchestrator/faultlab/chaos/around_command.py": OWN_MACHINE,
    "orchestrator/faultlab/chaos/injectors.py": OWN_MACHINE,
    "orchestrator/faultlab/testbed/live_run.py": OWN_MACHINE,
    "orchestrator/faultlab/testbed/local_cluster.py": OWN_MACHINE,
    "orchestrator/faultlab/testbed/resources.py": OWN_MACHINE,
    "orchestrator/faultlab/testbed/screen.py": OWN_MACHINE,
    "trainers/diagnostics/fault_injection.py": OWN_MACHINE,
    "trainers/callbacks/hugging_face.py": NEW_FOLDER,
    "trainers/checkpoint/assets.py": NEW_FOLDER,
    "trainers/checkpoint/hugging_face_out.py": NEW_FOLDER,
    "trainers/data/bpe.py": NEW_FOLDER,
    "trainers/data/parts.py": "each file has a random name, or lies in a folder that has one",
    "trainers/checkpoint/export.py": NEW_FOLDER,
    "gangway/terminal.py": "the null device",
}


def written(text: str) -> list[int]:
    """Returns the lines of a source that open a file by its name to write to it, and would follow a link."""
    found: list[int] = []
    if not re.search(r"open\(|write_text\(|write_bytes\(|touch\(", text):
        return found  # most files: parsing all of them takes seconds
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        of_path = isinstance(node.func, ast.Attribute)
        if name in ("write_text", "write_bytes", "touch") and of_path and getattr(node.func.value, "id", "") != "documents":
            found.append(node.lineno)
        modes = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        writes = any(re.fullmatch(r"[wa]b?\+?", mode) for mode in modes)
        is_safe = any(keyword.arg == "opener" for keyword in node.keywords) or (node.args and is_descriptor(node.args[0]))
        if name == "open" and writes and not is_safe:
            found.append(node.lineno)
    return found


def is_descriptor(node: ast.AST) -> bool:
    """What an `os` call returns, or a name that says it."""
    return isinstance(node, ast.Call) or (isinstance(node, ast.Name) and node.id == "descriptor")


@pytest.mark.parametrize("package", PACKAGES)
def test_each_file_is_opened_without_following_a_link(package):
    others = (path for path in sources(package) if str(path.relative_to(ROOT)) not in OTHERWISE)
    assert [f"{path.relative_to(ROOT)}:{line}" for path in others for line in written(path.read_text())] == []


@pytest.mark.parametrize(
    "text",
    [
        "open(path, 'w')",
        "open(path, 'ab')",
        "path.open('wb')",
        "path.write_text(a)",
        "path.touch()",
        "open(name, 'ab+', buffering=0)",
    ],
)
def test_a_write_by_name_is_found(text):
    assert written(text) == [1]


@pytest.mark.parametrize(
    "text", ["open(path)", "open(path, 'xb')", "open(path, 'ab', opener=no_link)", "open(os.open(path, 1), 'wb')"]
)
def test_what_follows_no_link_is_not(text):
    assert written(text) == []


def test_a_reason_is_for_a_file_that_needs_it():
    assert [name for name in OTHERWISE if not written((ROOT / name).read_text())] == []


@pytest.fixture
def victim(tmp_path):
    """A file of the user's, elsewhere."""
    path = tmp_path / "home" / "precious"
    path.parent.mkdir()
    path.write_text("precious")
    return path


@pytest.mark.parametrize("plant", [os.symlink, os.link], ids=["soft", "hard"])
def test_a_planted_link_changes_no_file(tmp_path, victim, plant):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("a.json", "a.json.tmp", "lines", "big.tmp"):
        plant(victim, run / name)
    durable.write(run / "a.json", "ours")
    assert (run / "a.json").read_text() == "ours"
    with pytest.raises(OSError, match=r"symbolic links|linked to another file"):
        durable.appending(run / "lines")
    with pytest.raises(OSError, match=r"symbolic links|linked to another file"), durable.whole(run / "big"):
        pass
    assert victim.read_text() == "precious"


def test_a_link_that_is_planted_for_a_file_to_come_makes_none_elsewhere(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "run").symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic links"), open(tmp_path / "run", "ab", opener=durable.no_link):
        pass
    with pytest.raises(FileExistsError):
        durable.created(tmp_path / "run")
    assert not elsewhere.exists()


# ---------------------------------------------------------------------- links to folders, inside a run

IS_A_LINK = "it is a link, and nothing of a run is reached through one"


@pytest.fixture
def home(victim):
    """A folder of the user's, elsewhere, some of whose names are ours."""
    for name in ("0001", "row", "12-1_0_00000000"):
        (victim.parent / name).mkdir()
        (victim.parent / name / "host-0000.txt").write_text("precious")
    for name in ("stop-000000000000.json", "loss.png"):
        (victim.parent / name).write_text("precious")
    return victim.parent


def content(folder):
    return {str(path.relative_to(folder)): path.is_file() and path.read_text() for path in sorted(folder.rglob("*"))}


OPERATIONS = {
    "put": lambda place: (place / "x").put(b"ours"),
    "create": lambda place: (place / "x").create(b"ours"),
    "get": lambda place: (place / "precious").get(),
    "a part": lambda place: (place / "precious").part(0, 3),
    "its size": lambda place: (place / "precious").exists(),
    "list": lambda place: place.list(),
    "folders": lambda place: place.folders(),
    "whether there is a folder": lambda place: (place / "row").is_dir(),
    "make a folder": lambda place: (place / "new").make(),
    "make folders": lambda place: (place / "new" / "and another").make(around=True),
    "settle": lambda place: place.settle(),
    "delete": lambda place: ours.delete(place / "precious", ours.LOOKED_AT),
    "delete a folder": lambda place: ours.delete_folder(place / "row", ours.LOOKED_AT),
    "delete what was left": lambda place: place.store.delete_left(place.key),
    "upload": lambda place: place.store.upload(f"{place.key}/x", ROOT / "README.md"),
    "download": lambda place: place.store.download(f"{place.key}/precious", ROOT / "build" / "precious"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("planted", ["logs", "incidents/0001"])
def test_nothing_of_a_run_is_reached_through_a_planted_link(tmp_path, home, planted, operation):
    (tmp_path / "run" / planted).parent.mkdir(parents=True)
    (tmp_path / "run" / planted).symlink_to(home)
    before, run = content(home), place_of_run(tmp_path / "run")
    with pytest.raises(StorageProblem, match=IS_A_LINK) as caught:
        OPERATIONS[operation](run / planted)
    assert caught.value.filename.startswith(f"{tmp_path}/run/{planted}")
    assert content(home) == before


def test_a_linked_file_of_a_run_is_neither_read_nor_listed_nor_written_through(tmp_path, victim):
    run = place_of_run(tmp_path / "run")
    (run / "folder" / "mine").put(b"ours")
    (tmp_path / "run" / "folder" / "theirs").symlink_to(victim)
    assert [entry.name for entry in run.list()] == ["folder/mine"]
    with pytest.raises(StorageProblem, match=IS_A_LINK):
        (run / "folder" / "theirs").get()
    (run / "folder" / "theirs").put(b"ours")
    assert (run / "folder" / "theirs").get() == b"ours"
    assert victim.read_text() == "precious"


def test_a_run_may_be_reached_through_a_link_and_a_model_may_have_some(tmp_path, home):
    (tmp_path / "storage" / "run").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "storage" / "run")
    (place_of_run(tmp_path / "link") / "previews" / "8.json").put(b"ours")
    assert (tmp_path / "storage" / "run" / "previews" / "8.json").read_bytes() == b"ours"
    (tmp_path / "model").symlink_to(home)
    assert (place_of(tmp_path) / "model" / "precious").get() == b"precious"


def test_a_folder_that_is_renamed_while_it_is_written_to_is_the_one_that_is_written_to(tmp_path, home, monkeypatch):
    run, write = place_of_run(tmp_path / "run"), durable.write_shared
    (run / "previews" / "4.json").put(b"ours")

    def late(path, contents, mode):
        (tmp_path / "run" / "previews").rename(tmp_path / "run" / "renamed")
        (tmp_path / "run" / "previews").symlink_to(home)
        write(path, contents, mode)

    before = content(home)
    monkeypatch.setattr(local_store.durable, "write_shared", late)
    (run / "previews" / "8.json").put(b"ours")
    assert content(home) == before
    assert (tmp_path / "run" / "renamed" / "8.json").read_bytes() == b"ours"


def preview(run):
    RunFolder(run).write(PREVIEWS_KIND, {"step": 8, "texts": []}, "previews/8.json")


def begun_anew(run):
    with fresh.moved_aside(run, True, lambda run: None):
        raise OSError("what the next step of a start may raise")


WRITERS = {
    "previews": preview,
    "tracking": lambda run: Tracker(run, TrackingConfig(mlflow=False), "run"),
    "incidents": lambda run: halt.write_stacks(halt.stacks_folder(run, 1), {0: "ours"}),
    "incidents/0001": lambda run: halt.write_stacks(halt.stacks_folder(run, 1), {0: "ours"}),
    "figures": lambda run: write_report([place_of(run)], f"{run}/report.html", place_of(run).path / "figures"),
    "requests": lambda run: requests.take(run, "launch"),
    "row": lambda run: lease.acquire(run, "launch"),
    "row by --accept-loss": lambda run: checkpoints.main([run, "--accept-loss"]),
    "row by --fresh": begun_anew,
    "timeline.jsonl": lambda run: RunFolder(run, 1).append("timeline.jsonl", "ours"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_driver_changes_nothing_elsewhere(tmp_path, home, writer, monkeypatch):
    run, planted = tmp_path / "run", writer.partition(" by ")[0]
    monkeypatch.setattr(record, "read", lambda run: None)
    monkeypatch.setattr(page, "of_one", lambda found: "")
    monkeypatch.setattr(page, "figures", lambda found: {"loss": b"ours"})
    (run / planted).parent.mkdir(parents=True)
    (run / planted).symlink_to(home)
    before = content(home)
    with suppress(OSError):
        WRITERS[writer](str(run))
    assert content(home) == before


def test_a_checkpoint_is_not_saved_in_a_linked_folder(tmp_path, home):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(home)
    before, manager = content(home), checkpointing.manager(tmp_path / "run" / "checkpoints")
    manager.save_now(4)
    assert manager.saved == []
    assert IS_A_LINK in manager.failed[0][1]
    assert content(home) == before

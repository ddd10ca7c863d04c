"""Nothing is written through a link that somebody else has planted: read from the sources, as `test_deletions` does."""

import ast
import os
import re

import pytest

from gangway.storage import durable
from tests import PACKAGES, ROOT
from tests.imports import sources

NEW_FOLDER = "it writes into a folder with a random name that it has just created"
OWN_MACHINE = "it writes into a folder of a test bed, or of an injected fault, that this user has made"
OTHERWISE = {
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
    "trainers/data/sources/pieces.py": NEW_FOLDER,
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

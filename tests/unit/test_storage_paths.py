"""Nobody takes the storage of a run for a path without knowing that it is no bucket: `Path("s3://b/x")` is a folder `s3:`."""

import ast

import pytest

from tests import PACKAGES, ROOT
from tests.imports import sources

OF_STORAGE = {"run_dir", "run_folder", "storage"}
"""How the code calls the folder or the URL of a run, or of all runs."""
ASKS = "it asks first whether it is a bucket"
REFUSED = "it refuses a bucket by name before"
ON_THIS_MACHINE = "it is given the folder of this machine that stands for a run in a bucket"
A_NAME = "it takes the name alone, or a URL stays one"
CHECKED = {
    "orchestrator/config/job.py": ASKS,
    "orchestrator/config/locate.py": ASKS,
    "orchestrator/faultlab/chaos/command.py": ASKS,
    "orchestrator/faultlab/testbed/live_run.py": ON_THIS_MACHINE,
    "orchestrator/run_state/fresh.py": ASKS,
    "orchestrator/run_state/lease.py": A_NAME,
    "orchestrator/tracking/config.py": ON_THIS_MACHINE,
    "orchestrator/tracking/of_bucket.py": ON_THIS_MACHINE,
    "orchestrator/tracking/shipper_process.py": ON_THIS_MACHINE,
    "trainers/checkpoint/carried.py": ASKS,
    "trainers/commands/prepare.py": "prepared data is a folder, and a URL is refused by name",
    "trainers/commands/run.py": ASKS,
    "trainers/library.py": REFUSED,
    "gangway/storage/identity.py": ASKS,
    "trainers/text/tokenizers.py": "a tokenizer that a bucket has kept is not found, and the run is refused for want of one",
    "trainers/trainer/base_trainer.py": A_NAME,
}


def taken_for_paths(text: str) -> list[int]:
    """Returns the lines of a source in which `Path`, `os` or `open` is given something that is called so."""
    found: list[int] = []
    if not any(name in text for name in OF_STORAGE):
        return found
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Call)
            and is_of_paths(ast.unparse(node.func))
            and node.args
            and names_in(node.args[0]) & OF_STORAGE
        ):
            found.append(node.lineno)
    return found


def is_of_paths(function: str) -> bool:
    return function in ("Path", "open") or (function.startswith("os.") and function not in ("os.fspath", "os.environ.get"))


def names_in(node: ast.AST) -> set[str]:
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return names | {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}


@pytest.mark.parametrize("package", PACKAGES)
def test_who_takes_storage_for_a_path_has_a_reason(package):
    found = {str(path.relative_to(ROOT)): lines for path in sources(package) if (lines := taken_for_paths(path.read_text()))}
    assert {name: lines for name, lines in found.items() if name not in CHECKED} == {}


def test_a_reason_is_for_a_file_that_needs_it():
    assert [name for name in CHECKED if not taken_for_paths((ROOT / name).read_text())] == []


@pytest.mark.parametrize(
    "text",
    [
        "Path(run_dir)",
        "Path(config.run_dir, 'a')",
        "open(f'{run_folder}/a')",
        "os.listdir(self.storage)",
        "os.path.join(storage, 'a')",
    ],
)
def test_what_takes_it_for_a_path_is_found(text):
    assert taken_for_paths(text) == [1]


@pytest.mark.parametrize("text", ["place_of(run_dir)", "documents.join(run_dir, 'a')", "os.fspath(run_folder)", "Path(folder)"])
def test_what_does_not_is_not(text):
    assert taken_for_paths(text) == []

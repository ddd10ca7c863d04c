"""Whatever is damaged in a checkpoint: what is restored is what was saved, or the damage is named and an older one is used."""

from __future__ import annotations

import gc
import random
import shutil
from pathlib import Path

import pytest

from gangway.errors import CheckpointUnavailableError
from gangway.storage.opening import place_of
from tests.programs import checkpointing
from trainers.checkpoint import layout, manifest

# When one array cannot be read, Orbax drops the coroutines that read the others.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CASES_PER_KIND = 17
"""With three damages to four kinds of files: 204 cases."""
DAMAGES = ("delete", "truncate", "flip")
VICTIMS = ("arrays", "orbax metadata", "meta", "manifest")


@pytest.fixture(autouse=True)
def _dropped_coroutines():
    yield
    gc.collect()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(the folder of two checkpoints, their states by step, a manager that has its programs compiled)"""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    manager = checkpointing.manager(folder)
    states = {step: manager.save_now(step) for step in (10, 20)}
    assert manager.saved == [10, 20]
    return folder, states, manager


def copied(folder: Path, run: Path, manager: checkpointing.Recording) -> None:
    """Lets the manager work in a copy of the run."""
    shutil.copytree(folder.parent, run)
    manager._owner.folder = place_of(run / folder.name)
    manager._owner._row = layout.row_of(manager.folder)


def files_of(kind: str, checkpoint: Path) -> list[Path]:
    if kind in ("meta", "manifest"):
        return [checkpoint / f"{kind}.json"]
    found = sorted(path for path in (checkpoint / manifest.STATE_FOLDER).rglob("*") if path.is_file())
    return [path for path in found if (path.parent.name == "d") == (kind == "arrays")]


def inflict(damage: str, path: Path, dice: random.Random) -> str:
    """Returns what was done."""
    content = bytearray(path.read_bytes())
    if damage == "delete":
        path.unlink()
        return f"deleted {path.name}"
    at = dice.randrange(len(content))
    if damage == "truncate":
        path.write_bytes(content[:at])
        return f"truncated {path.name} to {at} of {len(content)} bytes"
    bit = 1 << dice.randrange(8)
    content[at] ^= bit
    path.write_bytes(content)
    return f"flipped {bit:#x} in byte {at} of {len(content)} of {path.name}"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_never_restored_as_something_else(saved, tmp_path, damage, victim):
    folder, states, manager = saved
    dice = random.Random(f"{damage} {victim}")
    for case in range(CASES_PER_KIND):
        copied(folder, tmp_path / str(case), manager)
        done = inflict(damage, dice.choice(files_of(victim, checkpointing.at(manager.folder, 20))), dice)
        restored = manager.restore(checkpointing.abstract(states[20]))
        step = int(restored.state.step)
        assert checkpointing.same(restored.state, states[step]), done
        assert restored.meta["step"] == step, done
        if step != 20:
            assert [bad["step"] for bad in restored.skipped] == [20], done
            assert restored.skipped[0]["why"], done


@pytest.mark.sampled(4)
@pytest.mark.parametrize("victim", ["arrays", "orbax metadata", "meta"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_nor_is_one_that_has_no_manifest_to_tell(saved, tmp_path, damage, victim):
    """The last resort, with nothing but fingerprints and the reader's own checks between it and the damage."""
    folder, states, manager = saved
    dice = random.Random(f"last resort {damage} {victim}")
    for case in range(CASES_PER_KIND):
        copied(folder, tmp_path / str(case), manager)
        for step in (10, 20):
            (checkpointing.at(manager.folder, step) / manifest.MANIFEST_FILE).unlink()
        done = inflict(damage, dice.choice(files_of(victim, checkpointing.at(manager.folder, 20))), dice)
        restored = manager.restore(checkpointing.abstract(states[20]))
        step = int(restored.state.step)
        assert checkpointing.same(restored.state, states[step]), done
        assert "has no manifest any more" in manager.notes[-1]


def test_with_every_checkpoint_damaged_it_does_not_start_from_nothing(saved, tmp_path):
    folder, states, manager = saved
    copied(folder, tmp_path / "run", manager)
    for step in (10, 20):
        (checkpointing.at(manager.folder, step) / manifest.META_FILE).unlink()
    with pytest.raises(CheckpointUnavailableError, match=r"step 20: meta.json is missing; step 10: meta.json is missing"):
        manager.restore(checkpointing.abstract(states[20]))

"""Saving and restoring on one host, real files: which checkpoint is taken, which are kept, what a failed save leaves behind."""

import dataclasses
import os

import jax
import pytest

from gangway.errors import CheckpointError
from gangway.storage.opening import place_of
from gangway.storage.row import Row
from tests.programs import checkpointing
from trainers.checkpoint import layout, manifest
from trainers.checkpoint.array_io import ArrayFiles
from trainers.checkpoint.commit import Commit
from trainers.checkpoint.standalone import load_from, save_to


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def restore(folder, **conditions):
    """By a process that was just started."""
    manager = checkpointing.manager(folder)
    return manager, manager.restore(checkpointing.abstract(checkpointing.state(0)), **conditions)


def lose_manifest(folder, step):
    (checkpointing.at(folder, step) / manifest.MANIFEST_FILE).unlink()


def test_the_newest_is_restored_as_it_was_saved(folder):
    manager = checkpointing.manager(folder)
    saved = {step: manager.save_now(step, note="ä") for step in (1, 2)}
    again, restored = restore(folder)
    assert checkpointing.same(restored.state, saved[2])
    assert (restored.meta["step"], restored.meta["note"], restored.skipped) == (2, "ä", [])
    assert again.last_saved_step == 2
    assert sorted(os.listdir(checkpointing.at(folder, 2))) == ["manifest.json", "meta.json", "state"]


def test_what_was_saved_may_be_donated_at_once(folder):
    manager = checkpointing.manager(folder)
    state, expected = checkpointing.state(3), checkpointing.state(3)
    donate = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    manager.save(3, state, {})
    donate(state)
    manager.wait()
    assert checkpointing.same(restore(folder)[1].state, expected)


def test_plain_orbax_reads_what_was_saved(folder):
    from orbax.checkpoint import v1 as ocp

    state = checkpointing.manager(folder).save_now(4)
    loaded = ocp.load(checkpointing.at(folder, 4), checkpointing.abstract(state), checkpointable_name="state")
    assert checkpointing.same(loaded, state)


def test_a_checkpoint_from_before_the_state_had_other_state_of_the_model_is_restored(folder):
    manager, state = checkpointing.manager(folder), checkpointing.state(1)
    names = [field.name for field in dataclasses.fields(state) if field.name != "model_state"]
    before = jax.tree_util.register_dataclass(dataclasses.make_dataclass("Before", names), names, [])
    manager.save(1, before(*(getattr(state, name) for name in names)), {})
    manager.wait()
    assert checkpointing.same(restore(folder)[1].state, state)


def test_arrays_that_are_lacking_in_the_files_are_named(folder):
    state = checkpointing.manager(folder).save_now(1)
    wanted = checkpointing.abstract(dataclasses.replace(state, totals={**state.totals, "others": state.totals["tokens"]}))
    with pytest.raises(CheckpointError, match=r"state has no \.totals\['others'\]"):
        ArrayFiles().read(place_of(checkpointing.at(folder, 1) / "state"), wanted)


def test_with_no_checkpoint_there_is_nothing_to_restore(folder):
    manager, restored = restore(folder)
    assert restored is None
    assert manager.last_saved_step is None


def test_only_so_many_are_kept(folder):
    manager = checkpointing.manager(folder, keep=2)
    for step in (1, 2, 3, 4):
        manager.save_now(step)
    assert checkpointing.names(folder) == ["3", "4"]


def test_the_old_one_stays_until_the_new_one_is_committed(folder, monkeypatch):
    manager = checkpointing.manager(folder, keep=1)
    manager.save_now(1)
    monkeypatch.setattr(Commit, "_finish", fail)
    manager.save_now(2)
    assert checkpointing.names(folder) == ["1"]
    monkeypatch.undo()
    manager.save_now(2)
    assert checkpointing.names(folder) == ["2"]


def fail(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stage", ["_write", "_describe", "_digests", "_finish"])
def test_a_save_that_fails_anywhere_leaves_nothing_and_is_made_good_by_the_next(folder, monkeypatch, stage):
    manager = checkpointing.manager(folder)
    manager.save_now(1)
    monkeypatch.setattr(Commit, stage, fail)
    manager.save_now(2)
    assert manager.failed == [(2, "OSError: [Errno 28] No space left on device")]
    assert manager.failing
    assert manager.last_saved_step == 1
    assert checkpointing.names(folder) == ["1"]
    monkeypatch.undo()
    state = manager.save_now(2)
    assert not manager.failing
    assert manager.saved == [1, 2]
    assert checkpointing.same(restore(folder)[1].state, state)


def test_what_a_killed_save_has_left_is_removed_by_the_next_process(folder):
    checkpointing.manager(folder).save_now(1)
    for name in ("2-1_0_00000dea", "0-1_0_00000dea.deleted-0000dead"):
        (folder / name / "state").mkdir(parents=True)
    (folder / f"probe.{'0' * 32}.tmp").touch()
    manager, restored = restore(folder)
    assert restored.meta["step"] == 1
    manager.save_now(2)
    assert checkpointing.names(folder) == ["1", "2"]


def test_once_another_driver_has_the_run_nothing_is_saved(folder):
    manager = checkpointing.manager(folder)
    manager.save_now(1)
    checkpointing.take_over(folder)
    (folder / "9-1_0_00000bee").mkdir()
    manager.save_now(2)
    assert manager.saved == [1]
    assert "the run belongs to driver term 2, generation 0 on elsewhere" in manager.failed[0][1]
    assert checkpointing.names(folder) == ["1", "9-1_0_00000bee"]


def test_a_driver_that_comes_while_saving_is_seen_before_anything_is_committed(folder, monkeypatch):
    manager = checkpointing.manager(folder)
    digests = Commit._digests

    def slow(self, names):
        checkpointing.take_over(folder)
        return digests(self, names)

    monkeypatch.setattr(Commit, "_digests", slow)
    manager.save_now(1)
    assert "the run belongs to driver term 2" in manager.failed[0][1]
    assert checkpointing.names(folder) == []


def test_a_driver_that_comes_after_the_commit_is_seen_before_anything_is_deleted(folder, monkeypatch):
    manager = checkpointing.manager(folder, keep=1)
    manager.save_now(1)
    commit = Row.commit

    def just_before_another_driver_comes(*args, **kwargs):
        replaced = commit(*args, **kwargs)
        checkpointing.take_over(folder)
        return replaced

    monkeypatch.setattr(Row, "commit", just_before_another_driver_comes)
    manager.save_now(2)
    assert manager.saved == [1, 2]
    assert checkpointing.names(folder) == ["1", "2"]


def test_one_without_a_manifest_is_passed_over_and_named(folder):
    manager = checkpointing.manager(folder)
    for step in (1, 2):
        manager.save_now(step)
    lose_manifest(folder, 2)
    _, restored = restore(folder)
    assert restored.meta["step"] == 1
    assert restored.skipped == [{"step": 2, "why": manifest.NOT_COMMITTED}]


def test_one_without_a_manifest_is_the_last_resort(folder):
    manager = checkpointing.manager(folder)
    for step in (1, 2):
        manager.save_now(step)
    lose_manifest(folder, 2)
    (checkpointing.at(folder, 1) / "meta.json").unlink()
    again, restored = restore(folder)
    assert restored.meta["step"] == 2
    assert restored.skipped == [{"step": 1, "why": "meta.json is missing"}]
    assert "checkpoint 2 has no manifest any more" in again.notes[-1]


def test_one_that_is_refused_is_named_and_an_older_one_used(folder):
    manager = checkpointing.manager(folder)
    for step in (1, 2, 3):
        manager.save_now(step)
    again, restored = restore(folder, accept=lambda meta: "it knows of no skipped batch" if meta["step"] > 1 else "")
    assert (restored.meta["step"], restored.skipped) == (1, [])
    assert again.notes == [f"checkpoint {step} is not used: it knows of no skipped batch" for step in (3, 2)]


def test_if_all_are_refused_or_too_new_there_is_nothing_to_restore(folder):
    manager = checkpointing.manager(folder)
    for step in (2, 3):
        manager.save_now(step)
    assert restore(folder, before=1)[1] is None
    assert restore(folder, accept=lambda meta: "no")[1] is None
    assert restore(folder, before=2)[1].meta["step"] == 2


def test_what_training_has_gone_back_on_is_overwritten_and_keeps_no_place(folder):
    manager = checkpointing.manager(folder, keep=2)
    for step in (4, 8):
        manager.save_now(step)
    manager.restore(checkpointing.abstract(checkpointing.state(0)), before=4)
    manager.save_now(6)
    assert manager.steps() == [4, 6, 8]
    manager.save_now(7, course="new")
    assert manager.steps() == [6, 7, 8]
    manager.save_now(8, course="new")
    assert checkpointing.names(folder) == ["7", "8"]
    assert restore(folder)[1].meta["course"] == "new"


def test_a_checkpoint_of_another_training_is_not_overwritten(folder):
    expected = checkpointing.manager(folder).save_now(5)
    manager = checkpointing.manager(folder)
    manager.save_now(5, course="another")
    assert "is there already, from another training" in manager.failed[0][1]
    assert checkpointing.same(restore(folder)[1].state, expected)


def test_a_state_saved_by_itself_is_checked_in_every_byte(tmp_path):
    state = checkpointing.state(7)
    path = tmp_path / "deep" / "exported"
    save_to(str(path), state, {"arguments": {"name": "run"}})
    loaded, meta = load_from(str(path), checkpointing.abstract(state))
    assert checkpointing.same(loaded, state)
    assert meta["arguments"] == {"name": "run"}
    assert os.listdir(tmp_path / "deep") == ["exported"]
    with pytest.raises(CheckpointError, match="exists already: give a new folder"):
        save_to(str(path), state, {})
    largest = max((path / "state").rglob("*"), key=lambda file: file.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"exported is not whole: the contents of state/.* are not those"):
        load_from(str(path), checkpointing.abstract(state))


def test_leaves_of_any_kind_may_come_into_the_state(folder):
    flags, small = jax.numpy.arange(3) > 1, jax.numpy.int8(3)
    state = {"one": checkpointing.state(1), "more": jax.device_put({"flags": flags, "small": small}, checkpointing.everywhere())}
    manager = checkpointing.manager(folder)
    manager.save(1, state, {})
    assert checkpointing.same(manager.restore(checkpointing.abstract(state)).state, state)


def test_names_of_the_folder_are_what_the_command_reads(folder):
    checkpointing.manager(folder).save_now(1)
    assert layout.steps(place_of(folder)) == [1]
    assert manifest.read(layout.at(place_of(folder), 1)).step == 1

"""Checkpoints in a bucket: written where they stay, committed by a record, removed by a record; and an outage is no damage."""

import jax
import numpy as np
import pytest

from gangway.errors import CheckpointUnavailableError
from gangway.storage import opening, usage
from gangway.storage.object_store import Limits
from gangway.storage.opening import place_of
from gangway.storage.row import WriterTerm
from orchestrator.commands import plan
from tests.programs import checkpointing
from tests.stores.fault_proxy import Fault
from trainers.checkpoint import commit, layout, manifest, orbax_bucket, weights
from trainers.checkpoint.array_io import ArrayFiles
from trainers.checkpoint.retention import Retention


@pytest.fixture(params=["gs", pytest.param("s3", marks=pytest.mark.slow("as gs://, by another API and a slower server"))])
def bucket(request, stores, monkeypatch):
    stores[request.param].set(monkeypatch)
    monkeypatch.setattr(opening, "LIMITS", Limits(request_s=5.0, patience_s=1.0, first_wait_s=0.01, longest_wait_s=0.1))
    return stores[request.param]


@pytest.fixture
def folder(bucket):
    return f"{bucket.url()}/checkpoints"


def generation(folder, number, driver_term=1, **settings):
    """The manager of another process, which has restored what there is."""
    layout._rows.clear()
    manager = checkpointing.manager(folder, term=WriterTerm(driver_term, number), **settings)
    manager.restored = manager.restore(checkpointing.abstract(checkpointing.state(0)))
    return manager


def folders(folder):
    return place_of(folder).folders()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bucket", ["gs", "s3"], indirect=True)
def test_every_request_of_a_save_and_a_restore_is_counted_orbax_own_too(folder, bucket):
    """Beside what a plan expects of a save."""
    manager = generation(folder, 0, keep=1)
    manager.save_now(4)
    bucket.proxy.counted(), usage.HERE.take()
    manager.save_now(8)
    one = of_proxy(bucket), usage.HERE.take()
    generation(folder, 1)
    both = of_proxy(bucket), usage.HERE.take()
    for asked, counted in (one, both):
        assert {kind: counted.get(kind, 0) for kind in asked} == pytest.approx(asked, abs=2)
    planned, counted = plan.requests_of_save(1), one[1]
    assert counted["put"] + counted["list"] == pytest.approx(planned.writes, rel=0.3)
    assert counted["get"] + counted["head"] == pytest.approx(planned.reads, rel=0.3)
    assert counted["bytes_out"] > manifest.read(layout.at(place_of(folder), 8)).num_bytes / 2


def of_proxy(bucket):
    """What has passed the proxy since the last call, in the words of `Usage`. A deletion of many objects at S3 is a POST."""
    counted = bucket.proxy.counted()
    of_s3 = bucket.scheme == "s3"
    return {
        "put": counted.get("PUT", 0) + (0 if of_s3 else counted.get("POST", 0)),
        "delete": counted.get("DELETE", 0) + (counted.get("POST", 0) if of_s3 else 0),
        **{kind: counted.get(kind.upper(), 0) for kind in ("get", "head", "list")},
    }


@pytest.mark.parametrize("bucket", ["gs", "s3"], indirect=True)
def test_what_is_saved_is_restored_and_the_old_ones_are_deleted(folder):
    manager = generation(folder, 0, keep=2)
    states = {step: manager.save_now(step) for step in (4, 8, 12)}
    assert (manager.saved, manager.failed, manager.notes) == ([4, 8, 12], [], [])
    assert manager.steps() == [8, 12]
    assert [name.partition("-")[0] for name in folders(folder)] == ["12", "8"]
    assert manager.path(12).startswith(f"{folder}/12-1_0_")
    again = generation(folder, 1)
    assert again.restored.meta["step"] == 12
    assert checkpointing.same(again.restored.state, states[12])
    content = manifest.read(layout.at(place_of(folder), 12))
    assert content.at == again.path(12)
    assert content.files["meta.json"].sha256.startswith("tag:")


def copy_to_disk(url, folder):
    """As `gsutil cp -r` and `aws s3 cp --recursive` do."""
    place = place_of(url)
    for entry in place.list():
        (folder / entry.name).parent.mkdir(parents=True, exist_ok=True)
        (folder / entry.name).write_bytes((place / entry.name).get())


def test_a_plain_copy_on_a_disk_goes_on_and_keeps_its_rules(folder, tmp_path):
    manager = generation(folder, 0)
    states = {step: manager.save_now(step) for step in (4, 8)}
    place = place_of(folder)
    for entry in (place / manager.path(8).rpartition("/")[2]).list():  # a save that was cut short before its record
        (place / "12-1_0_00000000" / entry.name).put((place / manager.path(8).rpartition("/")[2] / entry.name).get())
    run = tmp_path / "run"
    copy_to_disk(folder.rpartition("/")[0], run)
    here = generation(str(run / "checkpoints"), 0, driver_term=2, keep=2)
    assert (here.restored.meta["step"], here.steps()) == (8, [4, 8])
    assert checkpointing.same(here.restored.state, states[8])
    here.save_now(16)
    assert (here.saved, here.failed, here.notes) == ([16], [], [])
    assert here.steps() == [8, 16]
    assert not list((run / "checkpoints").glob("4-*"))
    assert layout.is_whole(layout.at(place_of(run / "checkpoints"), 8))
    assert sorted(path.name.partition("-")[0] for path in (run / "checkpoints").iterdir()) == ["16", "8"]


def test_of_a_copy_without_records_the_newest_of_each_step_counts(folder, tmp_path):
    manager = generation(folder, 0)
    manager.save_now(4)
    run = tmp_path / "run"
    copy_to_disk(folder.rpartition("/")[0], run)
    (run / "row").rename(run / "elsewhere")
    again = generation(str(run / "checkpoints"), 0, driver_term=2)
    assert again.restored.meta["step"] == 4
    again.save_now(8)
    assert again.steps() == [4, 8]


def test_a_step_that_is_saved_again_takes_the_place_of_the_abandoned_one(folder):
    old = generation(folder, 0)
    for step in (4, 8):
        old.save_now(step)
    new = generation(folder, 1)
    new.restore(checkpointing.abstract(checkpointing.state(0)), before=4)
    state = new.save_now(8, course="new")
    assert (new.saved, new.failed) == ([8], [])
    assert [name.rpartition("_")[0] for name in folders(folder)] == ["4-1_0", "8-1_1"]  # what nobody names is deleted
    third = generation(folder, 2)
    assert third.restored.meta["course"] == "new"
    assert checkpointing.same(third.restored.state, state)


def test_what_could_not_be_deleted_is_deleted_after_the_next_save(bucket, folder):
    """What was removed, and what was not committed."""
    manager = generation(folder, 0, keep=1)
    manager.save_now(4)
    bucket.proxy.faults[:] = [Fault(r"^(DELETE|POST \S+\?delete)", "403")]
    manager.save_now(8)
    bucket.proxy.faults += [Fault("^PUT .*meta", "403")]
    manager.save_now(12)
    assert (manager.steps(), [name.partition("-")[0] for name in folders(folder)]) == ([8], ["12", "4", "8"])
    bucket.proxy.faults.clear()
    manager.save_now(16)
    assert [name.partition("-")[0] for name in folders(folder)] == ["16"]


def test_an_older_generation_commits_nothing_after_a_later_one(folder):
    old = generation(folder, 0)
    old.save_now(4)
    new = generation(folder, 1)
    old.save_now(8)
    new.save_now(8)
    assert (old.saved, new.saved) == ([4], [8])
    assert "the run belongs to driver term 1, generation 1" in old.failed[0][1]


def test_one_that_sleeps_between_look_and_commit_commits_nothing_and_leaves_nothing(folder, monkeypatch):
    old = generation(folder, 0)
    old.save_now(4)
    row, asleep = old._owner._row, []
    record = row.commit

    def sleeps(*about):
        if not asleep:
            asleep.append(generation(folder, 1))
            asleep[0].save_now(8, course="new")
        record(*about)

    monkeypatch.setattr(row, "commit", sleeps)
    old.save_now(8, course="old")
    assert (old.saved, asleep[0].saved) == ([4], [8])
    assert generation(folder, 2).restored.meta["course"] == "new"
    assert [name.partition("_")[0] for name in folders(folder)] == ["4-1", "8-1"]


def test_a_commit_whose_answer_is_lost_is_committed(bucket, folder):
    manager = generation(folder, 0)
    bucket.proxy.faults[:] = [Fault("^PUT .*row", "lost", times=4)]
    manager.save_now(4)
    assert (manager.saved, manager.failed) == ([4], [])
    assert generation(folder, 1).restored.meta["step"] == 4


def test_where_nobody_can_tell_whether_it_was_committed_nothing_is_deleted(bucket, folder):
    manager = generation(folder, 0)
    manager.save_now(4)
    bucket.proxy.faults[:] = [Fault("^PUT .*row", "lost")]
    manager.save_now(8)
    assert manager.saved == [4]
    bucket.proxy.faults.clear()
    assert generation(folder, 1).restored.meta["step"] == 8  # it was


OUTAGES = [(match, do) for match in ("meta.json", "manifest.json", "row") for do in ("503", "403")]
OUTAGES = [(f"^GET .*{match}", do) for match, do in OUTAGES] + [("^LIST .*checkpoints", "503"), ("^GET .*state", "403")]


@pytest.mark.parametrize(
    ("match", "do"),
    [*OUTAGES, pytest.param("^GET .*state", "503", marks=pytest.mark.slow("tensorstore tries for half a minute"))],
)
def test_an_outage_lets_no_older_checkpoint_win(bucket, folder, monkeypatch, match, do):
    monkeypatch.setitem(orbax_bucket.RETRIES, "max_retries", 1)
    manager = generation(folder, 0)
    for step in (4, 8):
        manager.save_now(step)
    layout._rows.clear()
    other = checkpointing.manager(folder, term=WriterTerm(1, 1))
    abstract = checkpointing.abstract(checkpointing.state(0))
    bucket.proxy.faults[:] = [Fault(match.replace("checkpoints", "8-1_0"), do)]
    with pytest.raises(CheckpointUnavailableError):
        other.restore(abstract)
    bucket.proxy.faults.clear()
    restored = other.restore(abstract)
    assert (restored.meta["step"], restored.skipped) == (8, [])
    other.save_now(12)
    assert other.steps() == [4, 8, 12]


def test_what_is_damaged_is_passed_over(folder):
    manager = generation(folder, 0)
    for step in (4, 8, 12):
        manager.save_now(step)
    place = layout.at(place_of(folder), 12)
    data = next(entry for entry in place.list() if "/d/" in entry.name)
    (place / data.name).put(bytes(data.size))
    (layout.at(place_of(folder), 8) / "meta.json").put(b"{}")
    restored = generation(folder, 1).restored
    assert restored.meta["step"] == 4
    assert [bad["step"] for bad in restored.skipped] == [12, 8]


def test_a_save_that_the_storage_does_not_take_fails_and_the_next_one_is_made(bucket, folder, monkeypatch):
    manager = generation(folder, 0)
    manager.save_now(4)
    bucket.proxy.faults[:] = [Fault("^PUT .*meta", "503")]
    manager.save_now(8)
    bucket.proxy.faults.clear()
    manager.save_now(12)
    assert (manager.saved, [step for step, _ in manager.failed]) == ([4, 12], [8])
    assert [name.partition("-")[0] for name in folders(folder)] == ["12", "4"]


def test_a_listing_that_lags_merges_no_part_of_a_checkpoint(bucket, folder, monkeypatch):
    monkeypatch.setattr(commit, "LISTING_PAUSE_S", 0.01)
    manager = generation(folder, 0)
    bucket.proxy.faults[:] = [Fault("^LIST .*delimiter.*state", "hide", names="ocdbt.process_0", times=3)]
    manager.save_now(4)
    assert (manager.saved, manager.failed) == ([4], [])
    bucket.proxy.faults[:] = [Fault("^LIST .*delimiter.*state", "hide", names="ocdbt.process_0")]
    manager.save_now(8)
    assert "does not list ocdbt.process_0, which a host has written: the bucket lists late" in manager.failed[0][1]


def test_models_are_saved_alone_and_tidied(folder):
    manager = generation(folder, 0)
    state = checkpointing.state(4)
    manager.save_model(4, state, {"batch_index": 4, "metrics": {}, "skipped_batches": []})
    manager.wait()
    models = place_of(folder).parent / "models"
    assert layout.steps(place_of(models)) == [4]
    assert "state/_METADATA" in manifest.names_below(layout.at(place_of(models), 4))


KEPT = Retention(newest=1, every_steps=4, only_models=frozenset({"every"}))


def test_of_an_old_checkpoint_the_model_is_kept_before_the_rest_is_deleted(bucket, folder):
    manager = generation(folder, 0, retention=KEPT)
    states = {step: manager.save_now(step) for step in (4, 8)}
    models = place_of(folder).parent / "models"
    assert (manager.notes, manager.steps(), layout.steps(place_of(models))) == ([], [8], [4])
    found = weights.stored(manifest.read_meta(layout.at(place_of(models), 4)))
    assert "embed" in found
    kept = ArrayFiles().read_one(layout.at(place_of(models), 4) / "state", found["embed"].key)
    assert kept.tobytes() == np.asarray(states[4].params["embed"]).tobytes()


@pytest.mark.parametrize("match", ["^PUT .*models.*meta", r"^PUT .*models.*manifest\.json"])
def test_where_the_model_cannot_be_kept_the_checkpoint_stays_and_the_next_save_tries_again(bucket, folder, match):
    manager = generation(folder, 0, retention=KEPT)
    manager.save_now(4)
    bucket.proxy.faults[:] = [Fault(match, "403")]
    manager.save_now(8)
    models = place_of(folder).parent / "models"
    assert (manager.steps(), layout.steps(place_of(models)), models.list()) == ([4, 8], [], [])
    bucket.proxy.faults.clear()
    manager.save_now(12)
    assert (manager.steps(), layout.steps(place_of(models))) == ([12], [4, 8])


def test_a_save_and_a_restore_ask_so_often(bucket, folder):
    manager = generation(folder, 0)
    manager.save_now(4)
    bucket.proxy.counted()
    manager.save_now(8)
    counts = {kind: number for kind, number in bucket.proxy.counted().items() if "bytes" not in kind}
    assert sum(counts.values()) <= 80, counts
    assert jax.process_count() == 1

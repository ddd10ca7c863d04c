"""Models at a cadence of their own: in a run, beside its checkpoints, after a kill, a rollback and a failure."""

from __future__ import annotations

import errno
import os
import shutil
import threading

import numpy as np
import pytest

from gangway.storage.opening import place_of
from tests.programs import checkpointing
from tests.programs.processes import PATIENCE_S
from tests.saved import saved
from tests.unit.trainers.checkpoint.test_retention import BEST, SIX, lie_in, model_at
from tests.unit.trainers.loop.test_skipped_batches import Poison
from tests.unit.training import FIXED, StopAt, of, trainer
from trainers import runtime
from trainers.checkpoint import layout, manifest
from trainers.checkpoint.retention import MayGo, Retention
from trainers.checkpoint.savers import ModelSaver
from trainers.trainer.beginnings import beginning
from trainers.trainer.build import build


def models_in(tmp_path):
    folder = place_of(tmp_path / "run" / "models")
    assert layout.unfinished(folder) == []
    for step in layout.steps(folder):
        content = manifest.read(layout.at(folder, step))
        assert list(content.problems(layout.at(folder, step), content.files, digest_up_to=None)) == []
    return layout.steps(folder)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("limit", "models"),
    [(None, [3, 6, 9, 12]), (2, [9, 12]), (1, [12])],
)
def test_a_run_saves_models_at_their_own_cadence_up_to_their_own_limit(tmp_path, events, limit, models):
    checkpoint = {"save_steps": 6, "save_total_limit": 1, "model_every_steps": 3, "model_limit": limit}
    made = trainer(tmp_path, optimizer=FIXED, checkpoint=checkpoint)
    state = made.train()
    assert models_in(tmp_path) == models
    assert [event["step"] for event in of(events, "saved")] == [6, 12]
    assert layout.steps(place_of(tmp_path / "run" / "checkpoints")) == [12]
    assert of(events, "note") == []
    whole = trainer(tmp_path / "other", optimizer=FIXED, init_from=str(saved(tmp_path / "run", 12, "models")), max_num_steps=1)
    build(whole)
    loaded = beginning(whole).make().params
    for name in ("embed", "out"):
        np.testing.assert_array_equal(loaded[name], state.params[name])


def test_without_checkpoints_the_models_keep_their_limit(tmp_path, events):
    trainer(tmp_path, optimizer=FIXED, checkpoint={"save_at_end": False, "model_every_steps": 2, "model_limit": 2}).train()
    assert models_in(tmp_path) == [10, 12]


@pytest.mark.slow("trains three times")
def test_after_a_restart_models_of_the_abandoned_steps_are_made_again(tmp_path, events):
    checkpoint = {"save_steps": 4, "model_every_steps": 3}
    trainer(tmp_path, StopAt(8, "requested"), optimizer=FIXED, checkpoint=checkpoint).train()
    folder = place_of(tmp_path / "run" / "checkpoints")
    at = layout.steps(folder)[-1]
    for step in layout.steps(folder):
        if step > 4:
            shutil.rmtree(saved(tmp_path / "run", step))
    layout.accept_loss(folder)
    (saved(tmp_path / "run", 6, "models") / "meta.json").write_text("of the abandoned course")
    (tmp_path / "run" / "models" / "9-0_0_0123abcd").mkdir()
    assert at > 6
    runtime.install(runtime.Runtime(events.append))
    trainer(tmp_path, optimizer=FIXED, checkpoint=checkpoint).train()
    assert models_in(tmp_path) == [3, 6, 9, 12]


def test_a_model_of_a_course_that_was_rolled_back_is_replaced(tmp_path, events):
    settings = {"optimizer": FIXED, "anomalies": {"non_finite": "rollback", "skip_before": 2}}
    checkpoint = {"save_steps": 4, "model_every_steps": 5}
    made = trainer(tmp_path, Poison(6), **settings, checkpoint=checkpoint)
    made.train()
    assert [event["restored_step"] for event in of(events, "anomaly")] == [4]
    assert models_in(tmp_path) == [5, 10]
    assert manifest.read_meta(place_of(saved(tmp_path / "run", 5, "models")))["skipped_batches"] == [4]


def test_a_model_that_cannot_be_saved_is_noted_and_ends_nothing(tmp_path, events, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ModelSaver, "_obstacle", full)
    made = trainer(tmp_path, optimizer=FIXED, checkpoint={"save_steps": 6, "model_every_steps": 6})
    made.train()
    assert [event["step"] for event in of(events, "saved")] == [6, 12]
    notes = [event["message"] for event in of(events, "note")]
    assert [note.partition(":")[0] for note in notes] == [
        "the model of step 6 was not saved",
        "the model of step 12 was not saved",
    ]


def test_a_model_and_a_checkpoint_are_saved_at_the_same_time(tmp_path):
    folder = tmp_path / "checkpoints"
    manager = checkpointing.manager(folder, retention=Retention(1, model_every_steps=1))
    state = checkpointing.state(1)
    meta = {"batch_index": 1, "metrics": {}, "skipped_batches": []}
    manager.save(1, state, meta)
    manager.save_model(1, state, meta)
    manager.wait()
    assert lie_in(folder) == (["1"], ["1"])
    params, _ = model_at(saved(tmp_path, 1, "models"))
    assert checkpointing.same(params, state.params)
    assert len(os.listdir(tmp_path / "models")) == 1


def test_training_does_not_wait_for_a_save_that_never_came_to_its_arrays(tmp_path, monkeypatch):
    monkeypatch.setattr(ModelSaver, "_obstacle", lambda *_: "")  # the folder vanished after it was looked at
    manager = checkpointing.manager(tmp_path / "checkpoints", retention=Retention(1, model_every_steps=1))
    meta = {"batch_index": 1, "metrics": {}, "skipped_batches": []}
    saves = threading.Thread(target=manager.save_model, args=(1, checkpointing.state(1), meta), daemon=True)
    saves.start()
    saves.join(PATIENCE_S)
    assert not saves.is_alive()
    manager.wait()
    assert [note.partition(":")[0] for note in manager.notes] == ["the model of step 1 was not saved"]


@pytest.mark.parametrize(
    ("retention", "models", "expected"),
    [
        (Retention(None, model_every_steps=2), [2, 4, 6], []),
        (Retention(None, model_every_steps=2, model_limit=1), [2, 4, 6], [2, 4]),
        (Retention(9, model_every_steps=2, model_limit=2), [2, 4, 6], [2]),  # few checkpoints: the models have their own limit
        (Retention(1, model_every_steps=2), [1, 2, 4], [1]),  # 1 was kept for another rule, which holds no more
        (Retention(1, best=1, only_models=BEST, model_every_steps=3, model_limit=1), [2, 3, 6], [3]),  # 2 is the best
        (Retention(1, every_steps=4, model_every_steps=2, model_limit=1), [2, 4, 6], [2]),
    ],
)
def test_models_of_the_cadence_stay_up_to_their_limit(retention, models, expected):
    assert retention.may_go(SIX, SIX, models, {2: 0.1}).models == expected
    assert isinstance(retention.may_go(SIX, SIX, models, {2: 0.1}), MayGo)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"checkpoint": {"model_limit": 2}}, "model_limit = 2: nothing saves models at a cadence of its own; set model_every"),
        ({"checkpoint": {"model_every_steps": 0}}, "model_every_steps = 0: expected at least 1"),
        (
            {
                "checkpoint": {"model_every_steps": 2},
                "optimizer": {"name": "schedule_free_adamw", "schedule": {"name": "constant"}},
            },
            "checkpoint.model_every_steps = 2: expected null, for the averages",
        ),
    ],
)
def test_what_is_wrong_with_the_settings(tmp_path, changes, why):
    with pytest.raises(ValueError, match=why):
        trainer(tmp_path, **changes)

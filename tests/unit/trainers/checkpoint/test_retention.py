"""Which checkpoints stay: a table of cases, and the folder of a run that trains."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from gangway.errors import CheckpointError, CheckpointUnavailableError
from gangway.storage.opening import place_of
from gangway.storage.row import Row
from tests.programs import checkpointing
from tests.programs.processes import PATIENCE_S
from tests.saved import saved
from trainers.checkpoint import layout, model_only, weights
from trainers.checkpoint.retention import MayGo, Retention


@pytest.mark.parametrize(
    ("found", "good", "limit", "may_go"),
    [
        ([1, 2, 3], [1, 2, 3], 3, []),
        ([1, 2, 3, 4], [1, 2, 3, 4], 3, [1]),
        ([1, 2, 3], [3], 1, [1, 2]),
        ([1, 2, 3, 4], [1, 2, 4], 3, []),  # 3 is damaged: nothing goes before there are three good ones
        ([1, 2, 3, 4], [2, 3, 4], 3, [1]),  # a damaged one goes when three newer ones are good
        ([1, 2, 3, 4, 9], [2, 3, 4], 3, [1]),  # 9 is left behind, and outlives none of the good ones
        ([1, 2, 9], [1, 2], 3, []),
        ([4, 5, 6, 7, 8], [4, 5, 6, 8], 2, [4, 5]),
        ([], [], 2, []),
        ([1], [], 1, []),
    ],
)
def test_what_may_go_is_older_than_enough_good_ones(found, good, limit, may_go):
    assert Retention(limit).may_go(found, good).checkpoints == may_go


SIX = [1, 2, 3, 4, 5, 6]
SCORES = {1: 0.9, 2: 0.1, 3: 0.5, 4: 0.2, 5: 0.4, 6: 0.8}


@pytest.mark.parametrize(
    ("retention", "scores", "stays"),
    [
        (Retention(1), SCORES, [6]),
        (Retention(2, best=2), SCORES, [2, 4, 5, 6]),
        (Retention(1, best=2, lower_better=False), SCORES, [1, 6]),  # the newest is one of the best two
        (Retention(1, best=1), {**SCORES, 4: 0.1}, [4, 6]),  # of equals the newer
        (Retention(1, best=1), {**SCORES, 2: float("nan")}, [4, 6]),
        (Retention(1, best=9), {3: 0.5}, [3, 6]),  # only what was evaluated has a score
        (Retention(1, best=1), {}, [6]),
        (Retention(1, every_steps=2), SCORES, [2, 4, 6]),
        (Retention(1, best=1, every_steps=3), SCORES, [2, 3, 6]),
        (Retention(2, best=1, every_steps=3), SCORES, [2, 3, 5, 6]),
        (Retention(9, best=1, every_steps=3), SCORES, SIX),
    ],
)
def test_what_stays_is_the_union_of_newest_best_and_every_nth(retention, scores, stays):
    gone = retention.may_go(SIX, SIX, scores=scores)
    assert [step for step in SIX if step not in gone.checkpoints] == stays
    assert gone.into_models == gone.models == []


def test_a_damaged_or_abandoned_one_is_never_among_the_best():
    """Were 2 counted, the only whole good one among the best would go for it."""
    assert Retention(1, best=1).may_go(SIX, [1, 3, 4, 5, 6], scores=SCORES).checkpoints == [1, 2, 3, 5]


BEST, EVERY, ALL = frozenset({"best"}), frozenset({"every"}), frozenset({"best", "every"})


@pytest.mark.parametrize(
    ("retention", "models", "expected"),
    [
        (Retention(1, best=2, only_models=BEST), [], MayGo([1, 2, 3, 4, 5], [2, 4], [])),
        (Retention(1, best=1, every_steps=2, only_models=BEST), [], MayGo([1, 3, 5], [], [])),  # 2 stays whole as a second one
        (Retention(1, best=1, every_steps=2, only_models=EVERY), [], MayGo([1, 3, 4, 5], [4], [])),
        (Retention(1, best=1, every_steps=2, only_models=ALL), [], MayGo([1, 2, 3, 4, 5], [2, 4], [])),
        # Cut short after the model was kept: the rest of the work is to delete the whole one.
        (Retention(1, best=1, only_models=BEST), [2], MayGo([1, 2, 3, 4, 5], [], [])),
        # A model that was among the best, and is no more.
        (Retention(1, best=1, only_models=BEST), [1, 2], MayGo([1, 2, 3, 4, 5], [], [1])),
    ],
)
def test_of_what_is_old_the_parameters_alone_may_stay(retention, models, expected):
    assert retention.may_go(SIX, SIX, models, SCORES) == expected


def test_models_that_are_kept_alone_compete_with_whole_checkpoints():
    retention = Retention(1, best=1, only_models=BEST)
    scores = {1: 0.3, 7: 0.2, 8: 0.6}
    assert retention.may_go([7, 8], [7, 8], [1], scores) == MayGo([7], [7], [1])
    assert retention.may_go([7, 8], [7, 8], [1], {**scores, 1: 0.1}) == MayGo([7], [], [])


def test_a_checkpoint_has_the_score_of_its_own_step_by_the_same_metrics():
    retention = Retention(1, metrics=("eval_loss",))
    scores = {"step": 4, "score": 0.5, "metrics": ["eval_loss"]}
    assert retention.score({"step": 4, "scores": scores}) == 0.5
    assert retention.score({"step": 5, "scores": scores}) is None
    assert retention.score({"step": 4, "scores": {**scores, "metrics": ["eval_accuracy"]}}) is None
    assert retention.score({"step": 4, "scores": None}) is None


# ---------------------------------------------------------------------- the folder of a run

LOSS = ("eval_loss",)
BEST_MODEL = Retention(1, best=1, only_models=BEST, metrics=LOSS)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def save(manager, step, score):
    return manager.save_now(step, scores={"step": step, "score": score, "metrics": list(LOSS)})


def lie_in(folder):
    models = folder.parent / "models"
    return checkpointing.names(folder), checkpointing.names(models) if models.exists() else []


def shapes_of_parameters():
    return checkpointing.abstract(checkpointing.state(0)).params


def model_at(path, wanted=None):
    """Returns the parameters of a checkpoint in `path`, and its meta."""
    found = weights.open_model(place_of(path))
    return weights.load(found, shapes_of_parameters() if wanted is None else wanted), found.meta


def damage(checkpoint):
    path = max((p for p in checkpoint.rglob("*") if p.parent.name == "d"), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_the_best_is_kept_as_a_model_and_can_be_loaded(folder):
    manager = checkpointing.manager(folder, retention=BEST_MODEL)
    best = save(manager, 1, 0.1)
    save(manager, 2, 0.5)
    save(manager, 3, 0.4)
    assert lie_in(folder) == (["3"], ["1"])
    params, meta = model_at(saved(folder.parent, 1, "models"))
    assert checkpointing.same(params, best.params)
    assert (meta["step"], meta["scores"]["score"]) == (1, 0.1)
    better = save(manager, 4, 0.05)
    save(manager, 5, 0.7)
    assert lie_in(folder) == (["5"], ["4"])  # the model of 1 is not the best any more
    assert checkpointing.same(model_at(saved(folder.parent, 4, "models"))[0], better.params)
    assert manager.notes == []


def test_the_model_in_a_whole_checkpoint_can_be_loaded_too(folder):
    state = checkpointing.manager(folder).save_now(1)
    assert checkpointing.same(model_at(saved(folder.parent, 1))[0], state.params)


def test_a_model_that_is_damaged_or_another_is_refused(folder):
    manager = checkpointing.manager(folder, retention=BEST_MODEL)
    save(manager, 1, 0.1)
    save(manager, 2, 0.5)
    path = saved(folder.parent, 1, "models")
    wider = checkpointing.abstract(checkpointing.state(0, rows=128)).params
    with pytest.raises(CheckpointError, match=r"does not fit the model: embed is \[64, 16\] there and \[128, 16\] here"):
        model_at(path, wider)
    damage(saved(folder.parent, 1, "models"))
    with pytest.raises((CheckpointError, CheckpointUnavailableError), match=r"is not whole|fingerprints differ"):
        model_at(path)


def test_a_model_whose_contents_are_others_is_refused(folder):
    """As where an array reads without an error, and is not the one that was saved."""
    checkpointing.manager(folder).save_now(1)
    found = weights.open_model(place_of(saved(folder.parent, 1)))
    name, stored = next(iter(found.parameters.items()))
    other = dataclasses.replace(
        found, parameters={**found.parameters, name: dataclasses.replace(stored, fingerprint=(1, 2, 3, 4))}
    )
    with pytest.raises(CheckpointUnavailableError, match="fingerprints differ"):
        weights.load(other, shapes_of_parameters())


@pytest.mark.parametrize("where", ["array_io.ArrayFiles.copy_parts", "manifest.write", "manifest.of_files"])
def test_where_a_model_cannot_be_kept_the_whole_checkpoint_stays(folder, monkeypatch, where):
    manager = checkpointing.manager(folder, retention=BEST_MODEL)
    save(manager, 1, 0.1)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    def instead(*args, **kwargs):
        monkeypatch.setattr(f"trainers.checkpoint.{where}", full)
        return keep(*args, **kwargs)

    keep = model_only.keep
    monkeypatch.setattr(model_only, "keep", instead)
    save(manager, 2, 0.5)
    assert lie_in(folder) == (["1", "2"], [])
    assert "1 could not be deleted: No space left on device" in manager.notes[0]
    monkeypatch.undo()
    save(manager, 3, 0.5)
    assert lie_in(folder) == (["3"], ["1"])


def test_a_kill_on_the_way_leaves_nothing_half(folder):
    manager = checkpointing.manager(folder, retention=BEST_MODEL)
    save(manager, 1, 0.1)
    save(manager, 2, 0.5)
    row = layout.row_of(place_of(folder))
    row.remove(row.newest().term, [1], "models")  # as if the process had died before it recorded the model
    layout._rows.clear()
    again = checkpointing.manager(folder, retention=BEST_MODEL)
    again.restore(checkpointing.abstract(checkpointing.state(0)))
    save(again, 3, 0.4)
    assert lie_in(folder) == (["3"], [])


def test_a_kill_after_the_model_was_kept_only_leaves_the_deleting(folder, monkeypatch):
    manager = checkpointing.manager(folder, retention=BEST_MODEL)
    save(manager, 1, 0.1)

    def killed(*about):
        raise OSError("killed here")

    monkeypatch.setattr(Row, "remove", killed)
    save(manager, 2, 0.5)
    assert lie_in(folder) == (["1", "2"], ["1"])
    monkeypatch.undo()
    monkeypatch.setattr(model_only, "keep", lambda *_, **__: pytest.fail("there is a model already"))
    save(manager, 3, 0.5)
    assert lie_in(folder) == (["3"], ["1"])


def test_a_damaged_checkpoint_becomes_no_model(folder):
    manager = checkpointing.manager(folder, retention=BEST_MODEL)
    save(manager, 1, 0.1)
    damage(saved(folder.parent, 1))
    save(manager, 2, 0.5)
    assert lie_in(folder) == (["1", "2"], [])
    assert "digests differ" in manager.notes[0]


def test_training_waits_for_no_model(folder, monkeypatch):
    go_on, entered = threading.Event(), threading.Event()

    def slow(*args, **kwargs):
        entered.set()
        assert go_on.wait(PATIENCE_S)
        return keep(*args, **kwargs)

    keep = model_only.keep
    monkeypatch.setattr(model_only, "keep", slow)
    manager = checkpointing.manager(folder, retention=BEST_MODEL)
    save(manager, 1, 0.1)
    for step in (2, 3):
        meta = {"batch_index": step, "scores": None}
        manager.save(step, checkpointing.state(step), meta)
        manager.wait_for_save()
        assert entered.wait(PATIENCE_S)
    assert manager.saved == [1, 2, 3]
    go_on.set()
    manager.wait()
    assert lie_in(folder) == (["3"], ["1"])


def test_a_model_of_a_course_that_was_left_goes(folder):
    manager = checkpointing.manager(folder, retention=Retention(1, best=2, only_models=BEST, metrics=LOSS))
    for step, score in ((1, 0.3), (2, 0.1), (3, 0.5)):
        save(manager, step, score)
    assert lie_in(folder) == (["3"], ["1", "2"])
    manager._course.continue_from(1, [3], [1, 2])  # as by a rollback to step 1
    save(manager, 2, 0.2)
    save(manager, 3, 0.6)
    assert lie_in(folder) == (["3"], ["1", "2"])
    _, meta = model_at(saved(folder.parent, 2, "models"))
    assert meta["scores"]["score"] == 0.2  # 0.1 was that of the course that was left


def test_without_a_limit_everything_stays():
    from trainers.config import CheckpointConfig

    keeps_all = Retention.of(CheckpointConfig(save_total_limit=None), None)
    assert keeps_all.may_go(range(1, 9), range(1, 9)) == MayGo([], [], [])
    assert keeps_all.may_go([], [], [1, 2]).models == []


@pytest.mark.parametrize("lower_better", [True, False])
def test_nan_is_never_among_the_best_even_if_too_few_others_are_there(lower_better):
    nan = float("nan")
    rules = Retention(1, best=3, lower_better=lower_better)
    gone = rules.may_go([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], scores={1: nan, 2: 0.5, 3: nan, 4: float("inf")})
    assert gone.checkpoints == [1, 3]
    assert rules.may_go([1, 5], [1, 5], scores={1: nan}).checkpoints == [1]

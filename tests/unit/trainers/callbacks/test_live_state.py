"""What a callback sees of the live state: the arrays of the present step, in three events only."""

import jax
import numpy as np
import pytest

from gangway.errors import UsageError
from tests.unit.training import OneDevice, assert_equal, trainer
from trainers.base import BaseTrainer
from trainers.callbacks import Callback, RunInfo

pytestmark = pytest.mark.usefixtures("events")

SHOWN = ("on_publish", "on_save", "on_evaluate")
ELSEWHERE = [name for name in vars(Callback) if name.startswith("on_") and name not in (*SHOWN, "on_exception")]
SHARDED = {
    "mesh": {"data": 2, "fsdp": 4},
    "task": "trainers.tasks.causal_lm:CausalLMTask",
    "model": {"vocab_size": 256, "width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 32},
    "previews": {"prompts": []},
}
RUN = {"max_num_steps": 6, "evaluation": {"every_steps": 4, "max_batches": 1}}


class Keeps(Callback):
    """Copies what it sees."""

    def __init__(self, trainer=None):
        super().__init__(trainer)
        self.seen = []

    def see(self, event, info):
        params, state = info.params(), info.train_state()
        assert params is state.params
        assert int(state.batch_index) == info.global_step
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
        is_sharded = not all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params))
        self.seen.append((event, info.global_step, jax.tree.map(np.asarray, params), is_sharded))

    def on_publish(self, state, **kwargs):
        self.see("on_publish", state)

    def on_save(self, state, **kwargs):
        self.see("on_save", state)

    def on_evaluate(self, state, **kwargs):
        self.see("on_evaluate", state)


def states_by_step(folder, cls, **changes):
    """Without any callback that reads: the parameters after each step, from a hook."""
    kept = {}

    class Steps(cls):
        def on_step_end(self, state, metrics, step):
            kept[step] = jax.tree.map(np.asarray, state.params)
            return state, metrics

    trainer(folder, cls=Steps, **RUN, **changes).train()
    return kept


@pytest.mark.parametrize("mesh", ["one device", "sharded"])
@pytest.mark.slow("trains more than once")
def test_they_are_those_of_the_present_step(tmp_path, mesh):
    cls, sharded = (OneDevice, {}) if mesh == "one device" else (BaseTrainer, SHARDED)
    keeps = Keeps()
    trainer(tmp_path / "seen", keeps, cls=cls, **RUN, **sharded).train()
    assert {event for event, *_ in keeps.seen} == set(SHOWN)
    assert {is_sharded for *_, is_sharded in keeps.seen} == {bool(sharded)}
    expected = states_by_step(tmp_path / "alone", cls, **sharded)
    for _, step, params, _ in keeps.seen:
        assert_equal(params, expected[step])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("event", ELSEWHERE)
def test_elsewhere_it_is_an_error(tmp_path, event):
    def method(self, state, **kwargs):
        state.params()

    reads = type("Reads", (Callback,), {event: method})()
    with pytest.raises(UsageError, match="can be read in on_publish, on_save and on_evaluate only"):
        trainer(tmp_path, reads, max_num_steps=6).train()  # an epoch


def test_after_an_event_nothing_is_left_of_the_state():
    info, state = RunInfo(), object()
    with info.showing(state):
        assert info.train_state() is state
    with pytest.raises(UsageError):
        info.train_state()


def test_a_callback_that_is_made_with_the_trainer_reaches_its_parts_and_the_parameters(tmp_path):
    class Made(BaseTrainer):
        def post_init(self):
            self.watch = Keeps(self)
            self.add_callback(self.watch)

    made = trainer(tmp_path, cls=Made, max_num_steps=2)
    made.train()
    assert made.watch.trainer is made
    assert made.watch.seen[-1][1] == 2
    assert_equal(made.watch.seen[-1][2], jax.device_get(made.output.state.params))


def test_the_trainers_own_state_is_the_live_one_where_callbacks_may_read_it(tmp_path):
    class Looks(Callback):
        seen = 0

        def on_publish(self, state, **kwargs):
            assert self.trainer._model_state is state.train_state()
            self.seen += 1

        def on_step_end(self, state, **kwargs):
            assert isinstance(self.trainer._model_state.step, jax.ShapeDtypeStruct)

    made = trainer(tmp_path, max_num_steps=3)
    looks = Looks(made)
    made.add_callback(looks)
    state = made.train()
    assert looks.seen == 3
    assert made._model_state is state

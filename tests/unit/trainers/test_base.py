"""BaseTrainer in one process, on eight devices: training, evaluation, saving, resuming, stopping."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from gangway.errors import CheckpointError, CheckpointUnavailableError, NotConfiguredError, SaveFailedError, UsageError
from gangway.stop_reason import StopReason
from tests.programs.tiny import Numbers, TableTask, numbers
from tests.saved import saved
from tests.unit.training import FIXED, OneDevice, StopAt, arguments, assert_equal, flip_a_byte, losses, of, trainer
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.callbacks import Callback
from trainers.protocol import TrainerProtocol


def test_trains_to_its_limit_and_says_what_it_did(tmp_path, events):
    made = trainer(tmp_path)
    state = made.train()
    output = made.output
    assert isinstance(made, TrainerProtocol)
    assert isinstance(TableTask(made.arguments).tokens_per_example, int)
    assert output.stop_reason is StopReason.MAX_STEPS
    assert int(state.step) == 12 == output.metrics["steps"]
    assert output.metrics["samples"] == 12 * 16
    assert output.metrics["tokens"] == 12 * 16 * 8
    assert sorted(losses(events)) == list(range(1, 13))
    assert losses(events)[12] < losses(events)[1]
    assert output.checkpoint_path == str(saved(tmp_path / "run", 12))
    assert [e["step"] for e in of(events, "saved")] == [4, 8, 12]
    assert output.metrics["eval_loss"] == pytest.approx(made.evaluate(state)["loss"])


def test_resumes_bit_for_bit_from_the_newest_checkpoint(tmp_path, events):
    whole = trainer(tmp_path / "whole").train()
    trainer(tmp_path / "cut", max_num_steps=6, optimizer=FIXED).train()
    events.clear()
    whole = trainer(tmp_path / "whole2", optimizer=FIXED).train()
    events.clear()
    resumed = trainer(tmp_path / "cut", optimizer=FIXED).train()
    assert of(events, "restored")[0]["step"] == 6
    assert min(losses(events)) == 7
    assert_equal(whole, resumed)


@pytest.mark.slow("compiles a step and trains")
@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 1, "fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_the_mesh_does_not_change_the_losses(tmp_path, events, mesh):
    made = trainer(tmp_path, mesh=mesh, checkpoint={"save_at_end": False})
    made.train()
    digest = made.output.metrics["samples_digest"]
    got = losses(events)
    events.clear()
    one = trainer(tmp_path, cls=OneDevice, checkpoint={"save_at_end": False})
    one.train()
    np.testing.assert_allclose(list(got.values()), list(losses(events).values()), rtol=2e-5)
    assert digest == one.output.metrics["samples_digest"]


def test_accumulation_does_not_change_the_losses(tmp_path, events):
    runs = []
    for accumulation_steps in (1, 2):
        trainer(tmp_path, accumulation_steps=accumulation_steps, checkpoint={"save_at_end": False}).train()
        runs.append(list(losses(events).values()))
        events.clear()
    np.testing.assert_allclose(runs[0], runs[1], rtol=2e-5)


def test_the_held_out_set_is_counted_once_whatever_its_ragged_end(tmp_path, events):
    made = trainer(tmp_path, max_num_steps=1)
    state = made.train()
    params = jax.device_get(state.params)
    sets = numbers(made.arguments)[1]
    rows = np.stack([sets[i]["tokens"] for i in range(len(sets))])
    logits = np.tanh(params["embed"][rows[:, :-1]]) @ params["out"]
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(logp, rows[:, 1:, None], -1).mean()
    assert made.evaluate(state)["loss"] == pytest.approx(expected, rel=1e-5)
    assert len(list(made.eval(state))) == 2  # 21 examples in batches of 16
    assert made.evaluate(state, lambda means: {"twice": 2 * means["loss"]})["twice"] == pytest.approx(2 * expected, rel=1e-5)


def test_a_damaged_checkpoint_is_named_and_an_older_one_used(tmp_path, events):
    trainer(tmp_path, max_num_steps=8, optimizer=FIXED).train()
    flip_a_byte(saved(tmp_path / "run", 8) / "state")
    events.clear()
    resumed = trainer(tmp_path, optimizer=FIXED).train()
    restored = of(events, "restored")[0]
    assert restored["step"] == 4
    assert [bad["step"] for bad in restored["skipped"]] == [8]
    assert_equal(resumed, trainer(tmp_path / "other", optimizer=FIXED).train())


def test_when_no_checkpoint_is_whole_it_does_not_start_from_nothing(tmp_path, events):
    trainer(tmp_path, max_num_steps=4).train()
    flip_a_byte(saved(tmp_path / "run", 4) / "state")
    with pytest.raises(CheckpointUnavailableError, match=r"no checkpoint in .* can be restored .*give the run another name"):
        trainer(tmp_path).train()


def test_a_checkpoint_of_another_model_is_refused(tmp_path, events):
    trainer(tmp_path, max_num_steps=4).train()
    with pytest.raises(CheckpointError, match=r"another model or optimizer .*absent here.*give the run another name"):
        trainer(tmp_path, optimizer={"name": "sgd", "learning_rate": 0.1}).train()


@pytest.mark.parametrize("reason", ["interrupted", "terminated", "requested"])
def test_a_stop_request_saves_the_state_and_says_why(tmp_path, events, reason):
    made = trainer(tmp_path, StopAt(5, reason), max_num_steps=1000, checkpoint={})
    state = made.train()
    assert made.output.stop_reason == reason
    assert 5 < int(state.step) <= 5 + 4
    assert made.output.checkpoint_path == str(saved(tmp_path / "run", int(state.step)))


def test_one_sentence_ends_training_on_all_hosts_and_saves(tmp_path, events):
    class Enough(Callback):
        def on_step_end(self, state, **kwargs):
            if state.global_step in (5, 6):
                runtime.request_stop("the loss is low enough")

    made = trainer(tmp_path, Enough(), max_num_steps=1000, checkpoint={})
    state = made.train()
    assert made.output.stop_reason is StopReason.REQUESTED
    assert of(events, "saved")[-1]["step"] == int(state.step) < 1000
    assert [note["message"] for note in of(events, "note")] == ["training is asked to stop: the loss is low enough"]
    # The request was for that training, and not for the process.
    later = trainer(tmp_path / "later", max_num_steps=8)
    later.train()
    assert later.output.stop_reason is StopReason.MAX_STEPS


def test_who_inherits_the_protocol_must_define_it_all(tmp_path):
    class Half(TrainerProtocol):
        def train(self, model_parameters=None, state=None):
            return None

    with pytest.raises(TypeError, match=r"abstract method.* configure_dataloaders, configure_functions, .*save_pretrained"):
        Half()


def test_a_time_limit_stops(tmp_path, events):
    made = trainer(tmp_path, max_num_steps=None, time_limit="1s", publish_every_steps=1000, optimizer=FIXED)
    made.train()
    assert made.output.stop_reason is StopReason.TIME_LIMIT
    assert made.output.checkpoint_path is not None


def test_epochs_limit_the_batches(tmp_path, events):
    made = trainer(tmp_path, max_num_steps=None, max_num_data_epochs=2, optimizer=FIXED)
    made.train()
    assert made.output.stop_reason is StopReason.MAX_EPOCHS
    assert made.output.metrics["samples"] == 2 * 96


def test_an_error_in_a_callback_is_an_error(tmp_path, events):
    class Bad(Callback):
        def on_step_end(self, state, **kwargs):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        trainer(tmp_path, Bad()).train()


def test_what_exists_later_says_so(tmp_path):
    made = trainer(tmp_path)
    with pytest.raises(NotConfiguredError, match="exists after configure_model"):
        _ = made.model
    with pytest.raises(NotConfiguredError, match="_model_state exists after configure_model"):
        _ = made._model_state
    made.prepare()
    assert made.model is not None
    assert made._model_state.params


def test_what_is_configured_by_hand_is_there(tmp_path):
    made = trainer(tmp_path)
    configured = made.configure_model()
    assert made.model is configured.model
    functions = trainer(tmp_path).configure_functions()
    by_functions = trainer(tmp_path)
    assert by_functions.configure_functions() is by_functions.functions
    assert by_functions.model is not None
    assert functions.mesh == by_functions.functions.mesh
    loaders = trainer(tmp_path)
    assert loaders.configure_dataloaders() is loaders.dataloaders


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["exported", "run", "run/checkpoints/3"])
def test_save_pretrained_can_be_trained_on(tmp_path, events, what):
    made = trainer(tmp_path, max_num_steps=3)
    state = made.train()
    made.save_pretrained(str(tmp_path / "exported"))
    other = trainer(tmp_path / "other", max_num_steps=5, optimizer=FIXED, mesh={"fsdp": 4})
    loaded = other.load_pretrained(str(tmp_path / what))
    assert_equal(loaded, state)
    assert loaded.params["embed"].sharding.mesh == other.mesh
    assert int(other.train(state=loaded).step) == 5


def test_what_is_no_saved_state_cannot_be_loaded(tmp_path, events):
    made = trainer(tmp_path)
    with pytest.raises(CheckpointUnavailableError, match="there is no"):
        made.load_pretrained(str(tmp_path / "nothing"))


def test_a_last_checkpoint_that_cannot_be_saved_is_an_error(tmp_path, events, monkeypatch):
    runtime.current().retry_for_s = 0

    class FillTheDisk(Callback):
        """A file where the folder of the checkpoints should be made."""

        def on_train_begin(self, state, **kwargs):
            (tmp_path / "run").mkdir(parents=True)
            (tmp_path / "run" / "checkpoints").write_text("in the way")

    with pytest.raises(SaveFailedError, match="the checkpoint of its last step, 6, could not be saved"):
        trainer(tmp_path, FillTheDisk(), max_num_steps=6).train()
    assert {event["step"] for event in of(events, "save_failed")} == {4, 6}


@pytest.mark.slow("trains twice")
def test_a_trainer_can_go_on_after_its_end(tmp_path, events):
    made = trainer(tmp_path, StopAt(5, "requested"), optimizer=FIXED)
    first = made.train()
    runtime.install(runtime.Runtime(events.append))
    made.callbacks.callbacks.clear()
    assert_equal(made.train(state=first), trainer(tmp_path / "whole", optimizer=FIXED).train())


@pytest.mark.slow("trains three times")
def test_started_again_at_its_end_it_tells_the_same(tmp_path, events, monkeypatch):
    first, second = trainer(tmp_path, optimizer=FIXED), trainer(tmp_path, optimizer=FIXED)
    first.train()
    # Nothing is trained, so nothing needs room.
    monkeypatch.setattr("trainers.checkpoint.layout.no_room", lambda folder, num_bytes: "no room")
    runtime.current().retry_for_s = 0
    second.train()
    assert second.output.metrics == first.output.metrics
    assert second.output.checkpoint_path == first.output.checkpoint_path


def test_a_resumed_process_says_where_it_is_before_its_first_step(tmp_path, events):
    seen = []

    class Looks(BaseTrainer):
        def on_step_start(self, state, step):
            seen.append((step, runtime.current().step, runtime.current().batch_index))
            return state

    trainer(tmp_path, max_num_steps=3, optimizer=FIXED).train()
    runtime.install(runtime.Runtime(events.append))
    trainer(tmp_path, cls=Looks, max_num_steps=4, optimizer=FIXED).train()
    assert seen == [(3, 3, 3)]


def test_what_a_subclass_configures_is_used_also_after_it_was_called_by_hand(tmp_path):
    class Mine(BaseTrainer):
        def configure_functions(self):
            functions = super().configure_functions()
            self.calls = self.calls + 1 if hasattr(self, "calls") else 1
            return functions._replace(checkpoint_manager=Counting(functions.checkpoint_manager))

        def configure_dataloaders(self):
            loaders = super().configure_dataloaders()
            return loaders._replace(dataloader_train=Counting(loaders.dataloader_train))

    made = trainer(tmp_path, cls=Mine, max_num_steps=2)
    made.configure_dataloaders()
    made.configure_functions()
    made.train()
    assert made.training.manager.names >= {"save", "path"}
    assert made.training.parts.loaders.dataloader_train.names >= {"batch", "close"}


class Counting:
    """Passes everything on, and knows what was asked for."""

    def __init__(self, inner):
        self.inner, self.names = inner, set()

    def __getattr__(self, name):
        self.names.add(name)
        return getattr(self.inner, name)


def test_what_are_no_arguments_and_no_held_out_examples_is_said(tmp_path):
    with pytest.raises(UsageError, match=r"the arguments are dict: expected TrainingArguments, which .*from_dict"):
        BaseTrainer({"name": "run"})
    with pytest.raises(UsageError, match="dataset_eval is generator, without a length or examples by index: expected a sequence"):
        BaseTrainer(arguments(tmp_path), Numbers(96, 8), (example for example in ()))

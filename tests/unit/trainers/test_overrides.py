"""Methods of a trainer or a callback that nothing would call, or that cannot be called, are errors when it is built."""

from __future__ import annotations

import functools
import inspect
import re
import threading
from pathlib import Path
from types import FunctionType

import pytest

from gangway.errors import UsageError
from tests.imports import sources
from tests.programs.tiny import TableTask
from tests.unit.training import arguments, trainer
from trainers.base import BaseTrainer
from trainers.callbacks import Callback
from trainers.other_systems import INSTEAD_OF_A_METHOD, INSTEAD_OF_A_TASK_METHOD, INSTEAD_OF_AN_EVENT
from trainers.overrides import CALLED_OF_A_TASK, check_overrides, own_method
from trainers.protocol import TrainerConfigureDataloaderOutput
from trainers.tasks.causal_lm import CausalLMTask


def method(self, *args):
    return None


def made(tmp_path, members, bases=(BaseTrainer,)):
    return trainer(tmp_path, cls=type("Mine", bases, dict(members)))


def refused(tmp_path, members, match, bases=(BaseTrainer,)):
    with pytest.raises(UsageError, match=match) as error:
        made(tmp_path, members, bases)
    return str(error.value)


NEVER = "^Mine has methods that nothing would call:\n  "
NOT_ALIKE = "^Mine overrides what the trainer calls, but not so that it can be called:\n  "


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("train_step", "Task.loss"),
        ("compute_loss", "Task.loss"),
        ("forward_backward_step", "forward_backward"),
        ("start_training_hook", "on_training_start"),
        ("start_evaluation_hook", "on_evaluation_start"),
        ("_preprocess_batch_input", "preprocess_batch"),
        ("_train_epoch", "on_epoch_begin"),
        ("_train_epochs", "did you mean _train_epoch"),
        ("on_step_begin", "on_step_start"),
        ("build_optimizer", "`optimizer`"),
        ("lr_scheduler", "`scheduler`"),
        ("get_train_dataloader", "configure_dataloaders"),
        ("compute_metrics", "calculate_metrics"),
        ("log", "on_step_end"),
        ("on_training_strat", "did you mean on_training_start"),
        ("build_data_transfrom", "did you mean build_data_transform"),
        ("configure_dataloader", "did you mean configure_dataloaders"),
        ("save_pretraned", "did you mean save_pretrained"),
    ],
)
def test_a_method_that_nothing_would_call_is_an_error(tmp_path, name, remedy):
    refused(tmp_path, {name: method}, f"{NEVER}{name}: .*{remedy}")


@pytest.mark.parametrize("wrap", [property, functools.cached_property, staticmethod, classmethod, functools.partialmethod])
def test_so_are_properties_and_other_kinds_of_methods(tmp_path, wrap):
    refused(tmp_path, {"build_optimizer": wrap(method)}, f"{NEVER}build_optimizer: ")


def test_every_event_of_a_callback_is_an_error_in_a_trainer_and_every_hook_in_a_callback():
    events = [name for name in vars(Callback) if name.startswith("on_")]
    hooks = [name for name, member in vars(BaseTrainer).items() if name.startswith("on_") and inspect.isfunction(member)]
    for name in set(events) - set(hooks):
        with pytest.raises(UsageError, match=f"{NEVER}{name}: .*(Callback|override)"):
            check_overrides(type("Mine", (BaseTrainer,), {name: method}), INSTEAD_OF_A_METHOD)
    for name in set(hooks) - set(events):
        with pytest.raises(UsageError, match=f"{NEVER}{name}: "):
            check_overrides(type("Mine", (Callback,), {name: method}), INSTEAD_OF_AN_EVENT)


def test_all_such_methods_are_named_at_once(tmp_path):
    names = ("on_step_strat", "start_training_hook")
    refused(tmp_path, dict.fromkeys(names, method), r"on_step_strat: .*\n  start_training_hook: ")


@pytest.mark.parametrize("table", [INSTEAD_OF_A_METHOD, INSTEAD_OF_AN_EVENT])
def test_no_name_of_ours_is_taken_for_one_of_another_system(table):
    ours = BaseTrainer if table is INSTEAD_OF_A_METHOD else Callback
    assert [name for name in table if hasattr(ours, name)] == []


def test_hooks_and_helpers_are_no_errors(tmp_path):
    made(tmp_path, dict.fromkeys(("on_training_start", "_sample_rollouts", "build_data_transform", "_x"), method))


class Marked(BaseTrainer):
    @own_method
    def predict(self, texts):
        return texts

    @own_method
    def on_training_started(self):
        return self.predict("a")

    def of_the_program(self):
        return 1


def test_a_method_of_the_users_own_is_no_error(tmp_path):
    trainer(tmp_path, cls=Marked)


def test_the_methods_of_a_mixin_are_checked_and_those_of_a_library_are_not(tmp_path):
    mixin = type("Mixin", (), {"on_step_begin": method})
    refused(tmp_path, {}, f"{NEVER}on_step_begin: ", (mixin, BaseTrainer))
    made(tmp_path, {"run": method}, (BaseTrainer, threading.Thread))
    after = type("Mixin", (), {"on_training_start": method})
    refused(tmp_path, {}, f"{NEVER}on_training_start: the class that defines it comes after BaseTrainer", (BaseTrainer, after))


def test_a_method_that_an_attribute_would_hide_is_an_error(tmp_path):
    refused(tmp_path, {"callbacks": method}, f"{NEVER}callbacks: the trainer has an attribute of this name")


def test_an_override_that_is_set_on_the_object_is_an_error(tmp_path):
    def post_init(self):
        self.prepare_batch = lambda state, batch, training: batch

    refused(tmp_path, {"post_init": post_init}, f"{NEVER}prepare_batch: define it in a class")


# ---------------------------------------------------------------------- overrides that cannot be called


@pytest.mark.parametrize(
    ("name", "override", "problem"),
    [
        ("on_step_end", lambda self, state, metrics: 0, r".*expected def on_step_end\(self, state, metrics, step\)"),
        ("on_step_end", lambda self, state, metrics, step, more: 0, ".*expected def"),
        ("on_step_end", lambda self, state, step, metrics: 0, "step has the place of metrics"),
        ("prepare_batch", lambda self, state, batch: 0, ".*training.*expected def"),
        ("post_init", staticmethod(lambda self: 0), ".*expected def"),
        ("freeze_module", ("embed",), "it is tuple, and must be a method"),
        ("freeze_module", property(method), "it is property, and must be a method"),
        ("optimizer", method, "it is a property"),
        ("scheduler", method, "it is a property"),
        ("has_defaults", method, "the trainer has an attribute of this name"),
        ("evaluate", lambda self: 0, ".*expected def evaluate"),
    ],
)
def test_an_override_with_another_signature_is_an_error(tmp_path, name, override, problem):
    refused(tmp_path, {name: override}, f"{NOT_ALIKE}{name}: {problem}")


async def waits(self, state):
    return state


def test_a_coroutine_is_no_hook(tmp_path):
    refused(tmp_path, {"on_training_start": waits}, f"{NOT_ALIKE}on_training_start: it is a coroutine")


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("on_step_end", method),
        ("on_step_end", lambda self, s, m, n, more=None: 0),
        ("prepare_batch", lambda self, state, batch, training: batch),
        ("prepare_batch", lambda self, *args, **kwargs: args[1]),
        ("evaluate", lambda self, state: 0),
        ("task", object()),
        ("build_model_assets", staticmethod(dict)),
    ],
)
def test_an_override_that_can_be_called_is_none(tmp_path, name, override):
    made(tmp_path, {name: override})


@pytest.mark.parametrize(
    ("name", "event", "problem"),
    [
        ("on_log", method, f"{NEVER}on_log: the event is on_publish"),
        ("on_substep_end", method, f"{NEVER}on_substep_end: "),
        ("on_pulish", method, f"{NEVER}on_pulish: .*did you mean on_publish"),
        ("on_step_end", lambda self, args, state, control, **kwargs: 0, f"{NOT_ALIKE}on_step_end: .*expected def"),
        ("on_step_end", lambda self, state, loss: 0, f"{NOT_ALIKE}on_step_end: .*expected def"),
        ("on_step_begin", lambda self, state, micro_batches=None, **kwargs: 0, "micro_batches: no such keyword"),
        ("on_save", lambda self, state, *, step, path, done=True, **kwargs: 0, "done: no such keyword"),
    ],
)
def test_the_same_holds_for_callbacks(tmp_path, name, event, problem):
    with pytest.raises(UsageError, match=problem):
        trainer(tmp_path, type("Mine", (Callback,), {name: event})())


def test_a_callback_takes_the_keywords_that_it_needs(tmp_path):
    events = {"on_step_end": lambda self, state, loss, **kwargs: 0, "on_save": lambda self, state, step, path: 0, "_x": method}
    trainer(tmp_path, type("Mine", (Callback,), events)())


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("model", "configure_model"),
        ("mesh", "configure_functions"),
        ("functions", "configure_functions"),
        ("dataloaders", "configure_dataloaders"),
        ("state_shardings", "configure_model"),
        ("frozen", "configure_model"),
    ],
)
@pytest.mark.parametrize(
    "how", [property, functools.cached_property, lambda getter: getter], ids=["property", "cached", "method"]
)
def test_what_only_shows_what_there_is_cannot_be_overridden(tmp_path, name, remedy, how):
    refused(
        tmp_path,
        {name: how(method)},
        f"^Mine overrides what only shows what there is:\n  {name}: nothing reads it: override `{remedy}`$",
    )


# ---------------------------------------------------------------------- what a setting or another override makes dead


@pytest.mark.parametrize(
    ("name", "remedy"), [("build_early_stopper", "set evaluation.score"), ("prepared_shapes", "override that too")]
)
def test_a_hook_that_the_settings_leave_without_a_use_is_an_error(tmp_path, name, remedy):
    settings = arguments(tmp_path)
    cls = type("Mine", (BaseTrainer,), {name: copied(getattr(BaseTrainer, name))})
    with pytest.raises(UsageError, match=rf"^Mine overrides what nothing would call:\n  {name}: .*{remedy}"):
        cls(settings)
    own = type("Mine", (BaseTrainer,), {name: own_method(copied(getattr(BaseTrainer, name)))})
    own(settings)


def copied(function):
    return FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def test_a_hook_that_the_settings_use_is_none(tmp_path):
    class Mine(BaseTrainer):
        build_early_stopper = copied(BaseTrainer.build_early_stopper)
        build_data_transform = copied(BaseTrainer.build_data_transform)
        prepared_shapes = copied(BaseTrainer.prepared_shapes)

        def prepare_batch(self, state, batch, *, training):
            return batch

    trainer(tmp_path, cls=Mine, evaluation={"every_steps": 2, "score": {"metrics": ["eval_loss"]}})


class OwnLoader(BaseTrainer):
    def preprocess_batch(self, batch, batch_index):
        return batch

    def configure_dataloaders(self):
        rows = self.batching.rows_of(self.dataset_train, range(16))
        return TrainerConfigureDataloaderOutput([rows] * 12, None)


class Wrapped:
    def __init__(self, loader):
        self.batch, self.loader = loader.batch, loader

    def __getattr__(self, name):
        return getattr(self.loader, name)


class WrapsTheLoader(OwnLoader):
    def configure_dataloaders(self):
        found = BaseTrainer.configure_dataloaders(self)
        return found._replace(dataloader_train=Wrapped(found.dataloader_train))


def test_a_loader_of_ones_own_calls_no_hook_of_the_built_in_one(tmp_path, events):
    match = r"OwnLoader overrides what nothing would call:\n  preprocess_batch: configure_dataloaders returns a loader of"
    with pytest.raises(UsageError, match=match):
        trainer(tmp_path, cls=OwnLoader).train()
    trainer(tmp_path, cls=WrapsTheLoader, max_num_steps=2).train()


# ---------------------------------------------------------------------- tasks


def task_with(base=TableTask, **members):
    return type("MyTask", (base,), members)(arguments(Path("unused")))


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("training_step", r"`loss\(model, batch\)`"),
        ("compute_metrics", r"Loss\.parts"),
        ("build_models", "did you mean build_model"),
        ("prediction", "did you mean predictions"),
        ("flops_per_tokens", "did you mean flops_per_token"),
    ],
)
@pytest.mark.parametrize("base", [TableTask, CausalLMTask])
def test_a_method_of_a_task_that_nothing_would_call_is_an_error(base, name, remedy):
    with pytest.raises(UsageError, match=rf"^MyTask has methods that nothing would call:\n  {name}: .*{remedy}"):
        check_overrides(type(task_with(base, **{name: method})), INSTEAD_OF_A_TASK_METHOD, CALLED_OF_A_TASK)


def test_all_that_the_system_calls_of_a_task_and_what_is_the_users_own_is_none():
    members = dict.fromkeys((*CALLED_OF_A_TASK, "helper", "_hidden"), method) | {"CONSTANT": 3}
    check_overrides(type(task_with(**members)), INSTEAD_OF_A_TASK_METHOD, CALLED_OF_A_TASK)
    check_overrides(type(task_with(prediction=own_method(method))), INSTEAD_OF_A_TASK_METHOD, CALLED_OF_A_TASK)


def test_a_trainer_checks_its_task(tmp_path):
    with pytest.raises(UsageError, match=r"MisspeltTask has methods that nothing would call:\n  los: .*did you mean loss"):
        trainer(tmp_path, task=f"{__name__}:MisspeltTask").configure_model()


class MisspeltTask(TableTask):
    def los(self, model, batch):
        return super().loss(model, batch)


def test_every_attribute_that_is_read_of_a_task_is_in_the_table():
    read = set()
    for path in (path for path in sources("trainers") if "tasks" not in path.parts):
        text = path.read_text()
        read |= set(re.findall(r"(?<!arguments)\b_?task\.([a-z_]+)\b(?!\s*=)", text)) - {"startswith", "fields", "description"}
        read |= set(re.findall(r"[gs]etattr\((?:self\.)?(?:_trainer\.|trainer\.)?task, \"(\w+)\"", text))
        read |= set(re.findall(r"hasattr\(task, \"(\w+)\"", text))
    assert read <= {*CALLED_OF_A_TASK, "reads"}
    assert {"loss", "build_model", "encode", "set_step_nr", "reads_base", "ids"} <= read

"""What methods of a user's trainer return is checked where they are called."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from gangway.errors import UsageError
from tests.unit.training import trainer
from trainers.base import BaseTrainer
from trainers.loop import returned
from trainers.loop.evaluator import IS_OBSERVED, observe_own
from trainers.protocol import Loss

LOSS = Loss(np.zeros(()), np.zeros(()))


def with_method(name, value):
    return adopted(type("Own", (BaseTrainer,), {name: lambda self, *args, **kwargs: value}))


def adopted(cls):
    """The class as it is once a trainer of it was made."""
    returned.check_returns(cls, BaseTrainer)
    observe_own(cls)
    return cls


@pytest.mark.parametrize("name", [name for name in returned.EXPECTED if name not in ("task", "optimizer", "scheduler")])
def test_each_method_that_forgets_its_return_is_named(name):
    cls = with_method(name, None)
    if returned.EXPECTED[name].holds(None):  # None is an answer
        assert getattr(cls, name)(None) is None
        cls = with_method(name, 3)
        with pytest.raises(UsageError, match=rf"^{name} returned 3: expected .+"):
            getattr(cls, name)(None)
    elif name == "evaluate":
        with pytest.raises(UsageError, match=r"^evaluate returned None \(is there a return\?\): expected the metrics"):
            cls.evaluate.__wrapped__(None)
    else:
        with pytest.raises(UsageError, match=rf"^{name} returned None \(is there a return\?\): expected .+"):
            getattr(cls, name)(None)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("freeze_module", 3, "3"),
        ("freeze_module", ("embed", None), r"\('embed', None\)"),
        ("build_param_groups", {"pattern": "a"}, "dict"),
        ("on_step_end", {"loss": 1}, "dict"),
        ("on_step_end", (None, {}), r"\(None, dict\)"),
        ("calculate_metrics", 0.5, "0.5"),
        ("postforward", (1.0, {}), r"\(1.0, dict\)"),
        ("on_micro_step", LOSS, "Loss"),
        ("build_collator", "stack", "'stack'"),
        ("preprocess_batch", [1], "list"),
        ("forward_backward", ((1.0, 2.0), {}), r"\(\(1.0, 2.0\), dict\)"),
    ],
)
def test_what_is_of_another_type_is_shown(name, value, shown):
    with pytest.raises(UsageError, match=rf"^{name} returned {shown}: expected "):
        getattr(with_method(name, value), name)(None)


@pytest.mark.parametrize(("name", "value"), [("freeze_module", "embed"), ("freeze_module", {"embed"}), ("build_collator", len)])
def test_what_is_right_passes(name, value):
    assert getattr(with_method(name, value), name)(None) == value


@pytest.mark.parametrize("wrap", [property, functools.cached_property])
@pytest.mark.parametrize("name", ["task", "optimizer", "scheduler"])
def test_properties_are_checked(tmp_path, name, wrap):
    made = trainer(tmp_path, cls=type("Own", (BaseTrainer,), {name: wrap(lambda self: None)}))
    with pytest.raises(UsageError, match=rf"^{name} returned None .*: expected "):
        getattr(made, name)


def test_static_methods_and_mixins_are_checked():
    class Mixin:
        @staticmethod
        def freeze_module():
            return None

    class Own(Mixin, BaseTrainer):
        pass

    class More(Own):
        def freeze_module(self):
            return [*super().freeze_module(), "head"]

    for cls in (adopted(Own), adopted(More)):
        with pytest.raises(UsageError, match=r"^freeze_module returned None"):
            cls.freeze_module() if cls is Own else cls.freeze_module(object.__new__(cls))


def test_one_pattern_may_be_a_text_and_a_wrong_one_is_named(tmp_path):
    made = trainer(tmp_path, cls=with_method("freeze_module", "embed"))
    made.prepare()
    assert [(group.pattern, group.frozen) for group in made.design.groups] == [("embed", True)]
    with pytest.raises(UsageError, match=r"^freeze_module: pattern = '\(': expected a regular expression"):
        trainer(tmp_path, cls=with_method("freeze_module", ["("])).prepare()


def test_nothing_is_checked_that_is_not_overridden():
    class Own(BaseTrainer):
        pass

    adopted(Own)
    assert not any(hasattr(getattr(Own, name), returned.IS_CHECKED) for name in returned.EXPECTED)
    assert not hasattr(Own.evaluate, IS_OBSERVED)

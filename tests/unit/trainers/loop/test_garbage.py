"""Python's garbage: collected at the same steps on all hosts, and as always afterwards."""

from __future__ import annotations

import gc

import pytest

from tests.unit.training import trainer
from trainers.callbacks import Callback


class Watch(Callback):
    def __init__(self, fail_at=None):
        self.enabled, self.fail_at = [], fail_at

    def on_step_end(self, info, **_):
        self.enabled.append(gc.isenabled())
        if len(self.enabled) == self.fail_at:
            raise RuntimeError("of the user")


@pytest.fixture
def collected(monkeypatch):
    """The calls of `gc.collect`."""
    calls = []
    monkeypatch.setattr("trainers.loop.train_loop.gc.collect", lambda: calls.append(1))
    return calls


def test_garbage_is_collected_at_the_steps_of_the_settings_and_at_no_others(tmp_path, collected):
    watch = Watch()
    trainer(tmp_path, watch, gc_every_steps=5, max_num_steps=12).train()
    assert (watch.enabled, len(collected)) == ([False] * 12, 2)
    assert gc.isenabled()


def test_without_the_setting_python_decides(tmp_path, collected):
    watch = Watch()
    trainer(tmp_path, watch, max_num_steps=4).train()
    assert (watch.enabled, collected) == ([True] * 4, [])


def test_after_an_error_python_decides_again(tmp_path):
    with pytest.raises(RuntimeError, match="of the user"):
        trainer(tmp_path, Watch(fail_at=2), gc_every_steps=5, max_num_steps=4).train()
    assert gc.isenabled()

"""A checkpoint manager of one's own, which inherits nothing, in the place of the one that there is."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np

from tests.unit.training import FIXED, assert_equal, of, trainer
from trainers.base import BaseTrainer
from trainers.checkpoint.fingerprints import fingerprints
from trainers.checkpoint.manager import CheckpointManager
from trainers.protocol import CheckpointManagerProtocol


class InMemory:
    """Keeps states in this process."""

    def __init__(self, kept):
        self.kept, self.failing, self.last_saved_step = kept, False, None
        self.calls = []

    def save(self, step, state, meta, *, patient=False):
        self.kept[step] = (jax.tree.map(np.array, state), meta)
        self.last_saved_step = step

    def restore(self, abstract, accept=None, before=None):
        for step in sorted(self.kept, reverse=True):
            host, meta = self.kept[step]
            if (before is None or step <= before) and not accept(meta):
                self.last_saved_step = step
                state = jax.tree.map(lambda leaf, like: jax.device_put(leaf.copy(), like.sharding), host, abstract)
                return SimpleNamespace(state=state, meta=meta, skipped=[])
        return None

    def path(self, step):
        return f"memory:{step}"

    def fingerprint(self, state):
        return jax.jit(fingerprints)(state)

    def wait_for_save(self):
        self.calls.append("wait_for_save")

    def wait(self):
        self.calls.append("wait")

    def close(self):
        self.calls.append("close")

    def load_ahead(self, state):
        self.calls.append("load_ahead")

    def prepare(self, state):
        self.calls.append("prepare")


class Remembers(BaseTrainer):
    kept: dict

    def build_checkpoint_manager(self):
        return InMemory(self.kept)


def test_a_run_is_saved_by_it_and_goes_on_from_it_bit_for_bit(tmp_path, events):
    cls = type("Own", (Remembers,), {"kept": {}})
    whole = trainer(tmp_path / "whole", optimizer=FIXED).train()
    trainer(tmp_path, cls=cls, max_num_steps=6, optimizer=FIXED).train()
    assert sorted(cls.kept) == [4, 6]
    events.clear()
    made = trainer(tmp_path, cls=cls, optimizer=FIXED)
    assert_equal(made.train(), whole)
    assert [event["step"] for event in of(events, "restored")] == [6]
    assert sorted(cls.kept) == [4, 6, 8, 12]
    assert made.output.checkpoint_path == "memory:12"
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert set(made.functions.checkpoint_manager.calls) == {"wait_for_save", "wait", "close", "load_ahead", "prepare"}


def test_what_is_required_is_what_there_is(tmp_path, events):
    assert isinstance(InMemory({}), CheckpointManagerProtocol)
    built = trainer(tmp_path).configure_functions().checkpoint_manager
    assert isinstance(built, CheckpointManager)
    assert isinstance(built, CheckpointManagerProtocol)

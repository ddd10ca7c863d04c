"""The optimizer's state in the memory of the devices' hosts (`optimizer.offload`): the same numbers, in a run's whole life."""

from __future__ import annotations

import shutil

import jax
import numpy as np
import pytest

from gangway.errors import UsageError
from gangway.stop_reason import StopReason
from tests.unit.trainers.test_context import LORA, SIZES, settings, texts, trained
from tests.unit.training import OneDevice, StopAt, arguments, assert_equal, of, trainer
from trainers.config import OptimizerConfig
from trainers.parallel import host_memory
from trainers.planning import estimate

__all__ = ["texts"]
MESH = {"data": 2, "fsdp": 2, "tensor": 2}
ADAMW = {"name": "adamw", "learning_rate": 0.01, "schedule": {"name": "constant"}}
ON_HOST = {**ADAMW, "offload": "host"}


def kinds(state):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim >= 2}


def assert_near(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


@pytest.mark.slow("trains several times")
def test_a_run_has_the_same_numbers_and_goes_on_bit_for_bit_also_with_the_key_changed(tmp_path, events, texts):
    about = {"mesh": MESH, "optimizer": ON_HOST, "checkpoint": {"save_steps": 4}}
    plain, expected, norms = trained(tmp_path / "plain", events, **{**about, "optimizer": ADAMW})
    whole, found, found_norms = trained(tmp_path / "whole", events, **about)
    assert kinds(plain) == {"device"}
    assert kinds(whole) == {host_memory.KIND}
    np.testing.assert_allclose([*found.values()], [*expected.values()], rtol=1e-6)
    np.testing.assert_allclose(found_norms, norms, rtol=1e-5)
    assert_near(whole, plain)
    trained(tmp_path / "cut", events, StopAt(6, StopReason.PREEMPTED), **about)
    shutil.copytree(tmp_path / "cut", tmp_path / "changed")
    resumed, _, _ = trained(tmp_path / "cut", events, **about)
    assert of(events, "restored")
    assert kinds(resumed) == {host_memory.KIND}
    assert_equal(whole, resumed)
    changed, _, _ = trained(tmp_path / "changed", events, **{**about, "optimizer": ADAMW})
    assert of(events, "restored")
    assert kinds(changed) == {"device"}
    assert_near(changed, plain)


@pytest.mark.slow("trains several times")
def test_adapters_and_groups_have_the_same_numbers(tmp_path, events, texts):
    trained(tmp_path, events, max_num_steps=1, checkpoint={"save_steps": 1}, cls=OneDevice)
    shutil.move(tmp_path / "run", tmp_path / "base")
    groups = [{"pattern": "query", "learning_rate": 0.02}, {"pattern": "down", "frozen": True}]
    about = {"mesh": MESH, "lora": {**LORA, "targets": ["query", "down"]}}
    plain, expected, _ = trained(tmp_path / "plain", events, **about, optimizer={**ADAMW, "groups": groups})
    found, losses, _ = trained(tmp_path / "host", events, **about, optimizer={**ON_HOST, "groups": groups})
    assert kinds(found) == {host_memory.KIND}
    np.testing.assert_allclose([*losses.values()], [*expected.values()], rtol=1e-6)
    assert_near(found, plain)


def test_an_optimizer_that_may_need_more_than_one_value_at_once_is_refused():
    with pytest.raises(ValueError, match=r"offload = 'host': muon may need several values .* use one of adamw, adam, lion, sgd"):
        OptimizerConfig(name="muon", offload="host")


def test_stages_are_refused(tmp_path):
    made = arguments(tmp_path, mesh={"data": 1, "pipeline": 2}, optimizer=ON_HOST, model={**SIZES, "num_layers": 2})
    with pytest.raises(ValueError, match=r"optimizer.offload = 'host': expected none with mesh.pipeline = 2"):
        made.check_devices(2)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"optimizer": ON_HOST}, "optimizer.offload = 'host': .*; set optimizer.offload: none"),
        (
            {"model": {"remat": "minimal_offloaded"}},
            "model.remat = 'minimal_offloaded': .*; set model.remat: save_qkv_proj, or full",
        ),
    ],
)
def test_devices_that_cannot_use_their_hosts_memory_are_told(tmp_path, monkeypatch, changes, expected):
    monkeypatch.setattr(host_memory, "kinds_of", lambda device: ["device"])
    made = trainer(tmp_path, **changes)
    why = r"the devices \(cpu\) have no memory of kind pinned_host \(JAX tells: device\)"
    with pytest.raises(UsageError, match=expected.replace(".*", why)):
        made.configure_functions()


def test_the_dry_run_tells_what_lies_in_the_memory_of_a_host(tmp_path, texts):
    plain, found = (
        estimate.plan(arguments(tmp_path, **settings(mesh=MESH, optimizer=optimizer)), 8)[1] for optimizer in (ADAMW, ON_HOST)
    )
    moved = found["host_bytes_per_device"]
    assert found["state_bytes_per_device"] + moved == plain["state_bytes_per_device"]
    assert "host_bytes_per_device" not in plain
    # Both moments of all matrices, divided as they are: more than half of the state.
    assert moved > 0.5 * plain["state_bytes_per_device"]

"""LoRA on two hosts: killed before and after its first checkpoint, it ends with the same bits, on the same base."""

from __future__ import annotations

import pytest

from gangway.storage.opening import place_of
from tests import ROOT
from tests.multihost import harness
from tests.multihost.test_checkpoints import arguments
from tests.multihost.test_init_from import waiting
from tests.saved import saved
from trainers.checkpoint import manifest
from trainers.tasks.causal_lm import CausalLMTask

WINGS = ("trainers/models", "trainers/checkpoint", "trainers/trainer")

HERE = "tests.multihost.test_lora"
BASE = str(ROOT / "tests" / "unit" / "data" / "parity" / "llama3")


def settings(storage, **changes):
    lora = {
        "task": "trainers.tasks.causal_lm:CausalLMTask",
        "model": {"pretrained": BASE},
        "lora": {"rank": 2, "dropout": 0.25},
        "data": {"sequence_length": 8, "dataset": "tests.programs.small_tokens:datasets"},
        "optimizer": {"name": "adamw", "learning_rate": 0.01, "schedule": {"name": "constant"}},
        "checkpoint": {"save_steps": 4},
        "publish_every_steps": 1,
        "previews": {"prompts": []},
    }
    return arguments(storage, **{**lora, **changes})


def trained(storage):
    return harness.run(settings(storage), storage / "logs", hosts=2, devices_per_host=1)


@pytest.mark.slow("starts the processes of several hosts")
def test_killed_before_and_after_its_first_checkpoint_it_ends_with_the_same_bits(tmp_path):
    whole = trained(tmp_path / "whole")
    slow = settings(tmp_path / "cut", task=f"{HERE}:Waits")
    for has_saved in (False, True):
        env = {"WAIT_AT": "5" if has_saved else "2"}
        hosts = harness.start(slow, tmp_path / f"cut-{has_saved}", hosts=2, devices_per_host=1, env=env)
        for host in hosts:
            host.wait_for("saved" if has_saved else "first_step")
        harness.kill(hosts)
    ended = trained(tmp_path / "cut")
    assert [event["step"] for event in ended[0].of("restored")] == [4]
    assert harness.result(ended[0])["params_digest"] == harness.result(whole[0])["params_digest"]
    notes = [[event["message"] for event in host.of("note") if "frozen weights" in event["message"]] for host in whole]
    assert [len(each) for each in notes] == [1, 0]
    meta = manifest.read_meta(place_of(saved(tmp_path / "cut" / "run", 6)))
    assert meta["frozen"]["base"]["checkpoint"] == BASE
    assert all("_lora_" in name for name in meta["shapes"] if name.startswith(".params"))


class Waits(CausalLMTask):
    def __init__(self, arguments):
        super().__init__(arguments)
        waiting()

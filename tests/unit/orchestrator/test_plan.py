"""`gangway plan`: what a run will need, of a real compiled step."""

from __future__ import annotations

import json
import types

import pytest

from cluster.hosts.config import HostsConfig
from orchestrator import plan as command
from orchestrator.commands import compile as compiling
from orchestrator.commands import plan
from orchestrator.config.job import ConfigError, load
from orchestrator.planning import hardware, trial
from orchestrator.planning.hardware import DEVICES
from tests import ROOT

TINY = str(ROOT / "configs" / "tiny.yaml")


@pytest.mark.slow("compiles for other machines")
def test_a_plan_for_other_machines(tmp_path, capsys):
    words = [TINY, f"storage={tmp_path}", "--on", "h100-2x2", "--price", "2", "--hours-between-failures", "10", "dtype=bfloat16"]
    words += ["data.paths=[/nowhere/text]", "data.tokenizer=/nowhere/tokenizer"]  # as only the hosts have them
    assert command.main([*words, "--json"]) == command.EXIT_FITS
    found = json.loads(capsys.readouterr().out)
    assert (found["devices"], found["hosts"], found["fits"], found["problem"]) == (4, 2, True, None)
    assert [line.partition(" is not here")[0] for line in found["not_looked_at"]] == [
        "data.paths.0 = /nowhere/text",
        "data.tokenizer = /nowhere/tokenizer",
    ]
    assert found["memory"]["peak"] > found["memory"]["arguments"] > found["state_bytes_per_device"] > 0
    assert found["step_s"] > 0
    assert found["step_s_range"][0] < found["step_s"] < found["step_s_range"][1]
    assert found["days"] == pytest.approx(found["max_steps"] * found["step_s"] / found["goodput"] / 86400)
    assert found["price"] == pytest.approx(found["days"] * 24 * 4 * 2)
    assert found["tokens_per_day"] == pytest.approx(found["tokens_per_step"] * found["goodput"] * 86400 / found["step_s"])


@pytest.mark.parametrize(("fp8", "not_of"), [("none", ""), ("current", " in bfloat16, not in 8 bits")])
def test_a_time_says_whose_runs_it_is_by(fp8, not_of):
    training = types.SimpleNamespace(model=types.SimpleNamespace(fp8=fp8))
    config = types.SimpleNamespace(hosts=HostsConfig(kind="gpu", devices_per_host=8), training=training)
    estimate = types.SimpleNamespace(flops_per_step=1e15, num_devices=8, num_hosts=1, state_bytes_per_device=1e9)
    found = plan.by_figures(config, estimate, {"exchanged": {"all-reduce": 1e9}}, DEVICES["h100"])
    assert found["source"] == f"published runs{not_of}"


def lines_of(**changes):
    found = {
        "name": "a",
        "on": "v5e-4",
        "devices": 4,
        "hosts": 1,
        "mesh": {"data": 4},
        "not_looked_at": [],
        "parameters": 1000,
        "memory": {"peak": 8e9, "arguments": 3e9},
        "memory_of_device": 16e9,
        "problem": None,
        "remedy": None,
        "exchanged": {"all-reduce": 1000},
        "flops_per_step": 1e12,
        "tokens_per_step": 512,
        "step_s": None,
        "not_predicted": "it does not fit",
    }
    return list(plan.lines(found | changes))


def test_what_a_person_reads():
    timed = {
        "step_s": 2.0,
        "step_s_range": [1.5, 3.0],
        "source": "published runs",
        "mfu": 0.5,
        "bound_by": "products",
        "tokens_per_day": 2e7,
        "checkpoint_bytes": 12e9,
        "save_every_s": 600.0,
        "save_s": 12.0,
        "best_save_steps": 40,
        "goodput": 0.99,
        "days": 3.5,
        "max_steps": 1000,
        "price": 1234.5,
        "requests": {"save": 95, "hour": 8820, "whole_run": 740880, "share_of_writes": 0.48},
    }
    assert lines_of(**timed) == [
        "a on v5e-4: 4 devices on 1 host, mesh data 4",
        "parameters       1,000 (1 k)",
        "memory           8 GB of a device at the peak of 16 GB (50%): state and batch 3 GB, the rest 5 GB",
        "exchanged        all-reduce 1 kB, by one device in a step",
        "FLOPs a step     1 TFLOP, 512 tokens",
        "step             2 s (1.5 to 3 by published runs), MFU 50%, bound by products",
        "tokens           20 M a day",
        "checkpoint       12 GB, every 10 min 00 s; written in some 12.0 s, beside the steps",
        "storage          some 95 requests a save, 8,820 an hour, 741 k in the whole run; 48% of them writes and lists",
        "saves            checkpoint.save_steps=40 would lose least at this rate of failures (Young, 1974)",
        "goodput          99.0% expected",
        "whole run        1,000 steps in 3.5 days",
        "price            1,234",
    ]
    assert "over a network   2 GB, to other slices or machines" in lines_of(**timed | {"network_bytes": 2e9})
    of_a_trial = {"source": "a trial on this machine", "mfu": None, "bound_by": None}
    assert "step             2 s (1.5 to 3 by a trial on this machine)" in lines_of(**timed | of_a_trial)
    short = {"step_s": 8.26e-5, "step_s_range": [7.77e-5, 8.68e-5], "save_every_s": 0.004, "save_s": 3e-4, "days": 2.87e-7}
    assert [line for line in lines_of(**timed | short) if line.startswith(("step", "checkpoint", "whole"))] == [
        "step             0.0826 ms (0.0777 to 0.0868 by published runs), MFU 50%, bound by products",
        "checkpoint       12 GB, every 4 ms; written in some 0.3 ms, beside the steps",
        "whole run        1,000 steps in 24.8 ms",
    ]
    assert "whole run        1,000 steps in 2 h 24 min" in lines_of(**timed | {"days": 0.1})
    assert not any("storage" in line for line in lines_of(**timed | {"requests": None}))
    assert lines_of(not_predicted="why not")[-1] == "step             not predicted: why not"


ESTIMATE = types.SimpleNamespace(
    num_devices=2, num_hosts=2, flops_per_step=1e9, tokens_per_step=512, checkpoint_bytes=5_000_000_000, max_steps=600
)
OPTIONS = types.SimpleNamespace(hours_between_failures=1.0, price=None, on=None)


def test_on_cpus_the_time_of_a_step_is_that_of_a_trial(monkeypatch, tmp_path):
    config = load(TINY, [f"storage={tmp_path}", "checkpoint.save_steps=10"])
    asked = []
    monkeypatch.setattr(trial, "of", lambda config, **about: asked.append(about) or trial.Trial(0.5, 0.9))
    found = plan.timed(config, ESTIMATE, {"fits": True, "memory": {"peak": 7}}, None, OPTIONS)
    assert asked == [{"flops": 1e9, "peak_bytes": 7}]
    assert (found["step_s"], found["step_s_range"], found["mfu"]) == (0.5, [0.5, 0.9], None)
    assert found["days"] * 86400 == pytest.approx(600 * 0.5 / found["goodput"])
    assert found["requests"] is None  # a folder
    # A save holds up training for half a second: 2 * 0.5 s * 3600 s, and the root of it.
    assert found["best_save_steps"] == 120


def test_only_gradients_go_between_slices_and_all_between_machines_with_gpus():
    """Before, a step on several slices was told as if all its exchanges went over the slower network."""
    about = {"num_devices": 32, "flops_per_step": 1e9, "state_bytes_per_device": 6e8, "checkpoint_bytes": 96e8, "parameters": 8e8}
    found, device = {"exchanged": {"all-gather": 2e9}}, DEVICES["v5e"]
    training = types.SimpleNamespace(model=types.SimpleNamespace(fp8="none"))
    took_s = {}
    for slices in (1, 2):
        hosts = types.SimpleNamespace(kind="tpu", slices=slices)
        estimate = types.SimpleNamespace(**about, num_hosts=4, mesh={"slice": 2} if slices > 1 else {})
        config = types.SimpleNamespace(hosts=hosts, training=training)
        took_s[slices] = plan.by_figures(config, estimate, found, device)["step_s"]
    # A sixteenth of 3.2 GB of gradients, half of it twice, at 3 GB/s.
    assert took_s[1] == pytest.approx(2e9 / 200e9)
    assert took_s[2] == pytest.approx(took_s[1] + 0.2e9 / 3e9)
    for machines, seconds in ((1, 2e9 / 450e9), (4, 2e9 / 50e9)):
        config = types.SimpleNamespace(hosts=types.SimpleNamespace(kind="gpu", slices=1), training=training)
        estimate = types.SimpleNamespace(**about, num_hosts=machines, mesh={})
        assert plan.by_figures(config, estimate, found, DEVICES["h100"])["step_s"] == pytest.approx(seconds)


def test_a_run_in_a_bucket_makes_requests_by_the_hour_and_by_the_save(monkeypatch):
    monkeypatch.setattr(trial, "of", lambda config, **about: trial.Trial(0.5, 0.9))
    asked = {}
    for steps in (10, 20):  # a save each 5 s, and each 10 s
        config = load(TINY, ["storage=gs://my-bucket/runs", f"checkpoint.save_steps={steps}"])
        found = plan.timed(config, ESTIMATE, {"fits": True, "memory": {"peak": 7}}, None, OPTIONS)
        asked[steps] = found["requests"]
        assert found["requests"]["whole_run"] == pytest.approx(found["days"] * 24 * found["requests"]["hour"], rel=0.01)
    assert asked[10]["hour"] - asked[20]["hour"] == 360 * asked[10]["save"]
    assert asked[10]["save"] == sum(plan.requests_of_save(2))
    assert plan.requests_of_save(3).writes > plan.requests_of_save(2).writes


def test_a_step_that_cannot_be_tried_says_why(tmp_path):
    config = load(TINY, [f"storage={tmp_path}"])
    large = types.SimpleNamespace(**vars(ESTIMATE) | {"flops_per_step": 3e12})
    fits = {"fits": True, "memory": {"peak": 7}}
    assert plan.timed(config, large, fits, None, OPTIONS) == {
        "step_s": None,
        "not_predicted": "a step of 3 TFLOP takes too long to be tried (1 at most)",
    }
    assert plan.timed(config, ESTIMATE, {**fits, "fits": False}, None, OPTIONS)["not_predicted"] == "it does not fit"


def test_a_step_that_does_not_fit_is_refused_with_the_change_that_was_tried(monkeypatch, tmp_path):
    """Here in place of the compiler: one that has room for full rematerialization alone."""
    tried = []

    def facts(config, room=None):
        tried.append((config.training.model.remat, config.training.accumulation_steps))
        if config.training.accumulation_steps < 2:
            raise ConfigError("tiny", ["the step does not fit in the memory of a device: 20G exceeds 15.75G"])
        return {"memory": {"peak": 1, "arguments": 1}, "exchanged": []}

    monkeypatch.setattr(compiling, "facts", facts)
    found = plan.compiled(load(TINY, [f"storage={tmp_path}", "global_batch_size=16"]))
    assert tried == [("none", 1), ("full", 1), ("none", 2)]
    assert found["problem"] == "the step does not fit in the memory of a device: 20G exceeds 15.75G"
    assert found["remedy"] == "accumulation_steps=2 (halves the micro-batch)"
    assert lines_of(problem=found["problem"], remedy=found["remedy"])[2:4] == [
        "memory           the step does not fit in the memory of a device: 20G exceeds 15.75G",
        "to make it fit   accumulation_steps=2 (halves the micro-batch)",
    ]


def test_a_step_too_large_for_this_machine_is_refused_and_the_change_makes_it_fit(monkeypatch, tmp_path):
    """The compiler for CPUs knows no limit: the memory that the hosts share is one."""

    def facts(config, room=None):
        peak = 5e9 if config.training.model.remat == "full" else 20e9
        return {"memory": {"peak": peak, "arguments": 1e9}, "exchanged": []}

    monkeypatch.setattr(compiling, "facts", facts)
    monkeypatch.setattr(hardware, "bytes_of_machine", lambda: 16e9)
    config = load(TINY, [f"storage={tmp_path}"])
    room = hardware.room(config.hosts, None)
    found = plan.compiled(config, room)
    assert "it needs 20 GB at its peak, and a device has 8 GB (2 share this machine)" in found["problem"]
    change = found["remedy"].partition(" (")[0]
    assert change == "model.remat=full"
    assert plan.compiled(load(TINY, [f"storage={tmp_path}", change]), room)["problem"] is None


def test_of_gpus_only_what_is_certain_is_refused():
    """Their peak is an upper bound; the state is not."""
    room = hardware.room(HostsConfig(kind="gpu", count=1, devices_per_host=8), DEVICES["h100"])
    assert room.lacks({"peak": 300e9, "arguments": 79e9}) == ""
    assert "81 GB for state and batch alone, and a device has 80 GB (h100)" in room.lacks({"peak": 300e9, "arguments": 81e9})
    assert hardware.room(HostsConfig(kind="cpu", count=2, spread=True), None) is None


def test_a_path_whose_folder_is_here_is_refused_before_anything_is_worked_out(tmp_path, capsys):
    assert command.main([TINY, f"storage={tmp_path}", f"data.paths=[{tmp_path}/txet]", "data.tokenizer=/nowhere/tokenizer"]) == 2
    why = f"it does not exist, and the folder around it is here, {tmp_path}; correct the path, or make it"
    assert capsys.readouterr().err.splitlines()[1:] == ["error: tiny: 1 problem", f"  data.paths.0 = {tmp_path}/txet: {why}"]
    assert lines_of(not_looked_at=["data.paths.0 = /text is not here"])[1] == "note             data.paths.0 = /text is not here"


def test_saves_by_steps_and_by_minutes():
    both = types.SimpleNamespace(save_steps=100, save_minutes=10.0)
    assert plan.save_interval_s(both, 2.0) == 200.0
    assert plan.save_interval_s(both, 60.0) == 600.0
    assert plan.save_interval_s(types.SimpleNamespace(save_steps=None, save_minutes=None), 1.0) == 86400.0


def test_wrong_words_are_refused(capsys):
    assert command.main([TINY, "--on", "v5f-256"]) == command.EXIT_REFUSED
    assert "did you mean v5" in capsys.readouterr().err

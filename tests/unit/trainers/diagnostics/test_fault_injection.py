"""Faults on order, in one process: what an order does, once, and that nothing happens without one."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback

import jax
import numpy as np
import pytest

from gangway.stop_reason import StopReason
from gangway.storage.opening import place_of
from orchestrator.faultlab.testbed import live_run
from tests.programs.processes import PATIENCE_S
from tests.unit import training
from trainers import runtime
from trainers.callbacks import Callback, RunInfo
from trainers.checkpoint.array_io import ArrayFiles
from trainers.diagnostics import fault_injection
from trainers.runtime import multihost


@pytest.fixture
def folder(tmp_path, monkeypatch):
    made = tmp_path / "faults"
    monkeypatch.setenv(fault_injection.FOLDER_VARIABLE, str(made))
    runtime.install(runtime.Runtime(lambda event: None))
    return made


@pytest.fixture
def injector(folder):
    return fault_injection.Injector(folder, 0)


def order(folder, kind, host=0, **settings):
    fault_injection.write(folder / f"host-{host:04d}.json", {"id": f"1-{kind}", "kind": kind, **settings})


def trainer(tmp_path, *callbacks, **changes):
    return training.trainer(tmp_path, *callbacks, **{"max_num_steps": 6, "checkpoint": {}, **changes})


def step(injector, batch_index=5, batch=None):
    info = RunInfo(global_step=batch_index)
    injector.on_step_begin(info, batch=batch if batch is not None else {})
    return info


def test_the_orchestrator_and_the_injector_mean_the_same_folder_and_faults():
    assert live_run.FAULTS_VARIABLE == fault_injection.FOLDER_VARIABLE
    ordered = {"slow", "hang", "skip_collective", "desync", "stuck_save", "nan", "exception", "device_error", "odd_event", "fork"}
    assert set(fault_injection.FAULTS) == ordered | {"kill", "stop"}


def test_it_says_whose_process_a_host_is(folder, tmp_path):
    fault_injection.install(trainer(tmp_path))
    member = json.loads((folder / "members" / "host-0000.json").read_text())
    assert (member["host"], member["num_hosts"], member["pid"]) == (0, 1, os.getpid())


def test_a_trainer_that_takes_no_callbacks_is_left_alone(folder):
    fault_injection.install(object())
    assert (folder / "members" / "host-0000.json").exists()


def test_an_order_is_taken_once_by_its_host_at_its_batch_and_noted(folder, injector):
    order(folder, "exception", at=5)
    step(injector, 4)
    step(fault_injection.Injector(folder, 1), 5)
    with pytest.raises(RuntimeError, match=r"an error on order \(1-exception\) at batch 5"):
        step(injector, 5)
    step(injector, 6)
    taken = json.loads((folder / "taken" / "1-exception.json").read_text())
    assert (taken["host"], taken["pid"], taken["batch_index"]) == (0, os.getpid(), 5)
    assert sorted(path.name for path in folder.iterdir()) == ["taken"]


def test_a_slow_host_sleeps_for_so_many_steps(folder, injector, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    order(folder, "slow", step_s=0.5, steps=2)
    for batch in range(5):
        step(injector, batch)
    assert slept == [0.5, 0.5]


def test_the_pace_holds_as_long_as_its_file_is_there(folder, injector, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    fault_injection.write(folder / "pace.json", {"step_s": 0.25})
    step(injector, 0)
    step(injector, 1)
    (folder / "pace.json").unlink()
    step(injector, 2)
    assert slept == [0.25, 0.25]


def test_nan_spoils_the_weights_of_one_batch_and_leaves_their_place(folder, injector, tmp_path):
    made = trainer(tmp_path)
    loader = made.configure_dataloaders().dataloader_train
    batch = loader.batch(0)
    whole = dict(batch)
    order(folder, "nan")
    step(injector, 0, batch)
    assert np.isnan(np.asarray(batch["weight"])).all()
    assert batch["weight"].sharding == whole["weight"].sharding
    np.testing.assert_array_equal(batch["tokens"], whole["tokens"])
    loader.close()


def test_a_host_out_of_step_is_one_batch_further(folder, injector):
    order(folder, "desync")
    assert step(injector, 5).batch_index == 6


def test_a_stop_is_a_request_that_all_hosts_agree_on(folder, injector):
    order(folder, "stop")
    step(injector)
    assert runtime.current().stop_reason == StopReason.REQUESTED


def test_a_skipped_collective_waits_in_an_exchange_of_its_own(folder, injector, monkeypatch):
    waits: list[str] = []
    monkeypatch.setattr(multihost, "barrier", lambda topic, timeout_s: waits.append(topic))
    order(folder, "skip_collective")
    step(injector)
    assert waits == ["a collective that the other hosts skip"]


def test_a_hang_shows_its_name_in_the_stack(folder, injector):
    order(folder, "hang")
    assert shows(lambda: step(injector), "hang_for_ever")


def test_a_stuck_save_is_stuck_in_the_background_of_the_next_checkpoint(folder, injector, tmp_path, monkeypatch):
    monkeypatch.setattr(ArrayFiles, "write", ArrayFiles.write)  # put back at the end
    made = trainer(tmp_path)
    state = made.train()
    order(folder, "stuck_save")
    step(injector)
    copied = threading.Event()
    target = tmp_path / "arrays"
    target.mkdir()
    assert shows(lambda: ArrayFiles().write(place_of(target), lambda: state, copied.set), "write_for_ever")
    assert copied.is_set()


def shows(work, function):
    """Whether a thread that does `work` comes to be in `function`."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s and thread.is_alive():
        frame = sys._current_frames().get(thread.ident)
        if frame and function in [entry.name for entry in traceback.extract_stack(frame)]:
            return True
        time.sleep(0.01)
    return False


def test_a_kill_is_noted_before_it_strikes(folder, injector, monkeypatch):
    noted: list[bool] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: noted.append((folder / "taken" / "1-kill.json").exists()))
    order(folder, "kill")
    step(injector)
    assert noted == [True]


def test_rows_of_a_batch_have_digests_that_do_not_depend_on_the_devices(folder, tmp_path):
    made = trainer(tmp_path, accumulation_steps=2)
    loader = made.configure_dataloaders().dataloader_train
    batch, later = loader.batch(0), loader.batch(1)
    alone = {name: jax.device_put(np.asarray(leaf), jax.devices()[0]) for name, leaf in batch.items()}
    rows = fault_injection.row_digests(batch)
    assert rows == fault_injection.row_digests(alone)
    assert sorted(rows) == sorted(f"{micro}.{row}" for micro in range(2) for row in range(8))
    assert not set(rows.values()) & set(fault_injection.row_digests(later).values())
    padded = {**alone, "weight": np.asarray(alone["weight"]).copy()}
    padded["weight"][1, 7] = 0
    padded["weight"] = jax.device_put(padded["weight"], jax.devices()[0])
    assert set(rows) - set(fault_injection.row_digests(padded)) == {"1.7"}
    loader.close()


class Spoiler(Callback):
    def on_step_begin(self, state, *, batch, **kwargs):
        batch["weight"] = batch["weight"] * 2


def test_what_is_recorded_of_a_batch_is_what_was_read_before_any_other_callback(folder, tmp_path):
    (folder / "batches").mkdir(parents=True)
    recorded = []
    for callbacks in ((), (Spoiler(),)):
        made = trainer(tmp_path / str(len(callbacks)), *callbacks)
        fault_injection.install(made)
        made.train()
        (path,) = (folder / "batches").glob("*.jsonl")
        recorded.append([json.loads(line) for line in path.read_text().splitlines()])
        path.unlink()
    assert [line["batch"] for line in recorded[0]] == list(range(6))
    assert recorded[0] == recorded[1]

"""Profiles: the windows of the schedule, requests while it runs, and what a failing profiler costs."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from gangway.storage.opening import place_of
from orchestrator.commands.profile import how_to_look
from tests.stores.fault_proxy import Fault
from tests.unit.training import of, trainer
from trainers import runtime
from trainers.callbacks import Callback
from trainers.callbacks.profiler import Profiler
from trainers.config import ProfileConfig


def test_the_schedule_skips_then_waits_warms_up_and_records_again_and_again(tmp_path):
    config = ProfileConfig(skip_steps=5, wait_steps=2, warmup_steps=2, record_steps=3, repeat=2)
    made = Profiler(config, str(tmp_path))
    due = {step: what for step in range(40) if (what := made.due(step))}
    assert due == {7: "warm up", 9: "record", 14: "warm up", 16: "record"}
    assert [Profiler(ProfileConfig(), str(tmp_path)).due(step) for step in range(5)] == [None] * 5
    assert Profiler(ProfileConfig(record_steps=1, hosts=(1,)), str(tmp_path)).due(1) is None  # this host is 0


def test_windows_that_would_overlap_are_refused():
    with pytest.raises(ValueError, match="wait_steps = 0: expected at least 2 with repeat = 2"):
        ProfileConfig(record_steps=1, repeat=2)


class Asks(Callback):
    """For a profile of two steps at each of these batches; at those of `patient`, when the one before is written."""

    def __init__(self, *steps, patient=()):
        self.steps, self.patient = steps, patient

    def on_step_end(self, state, **kwargs):
        if state.global_step in (*self.steps, *self.patient):
            while state.global_step in self.patient and runtime.current().profiling:
                time.sleep(0.01)
            runtime.current().request_profile({"id": f"asked at {state.global_step}", "steps": 2})


@pytest.mark.slow("trains more than once")
def test_on_schedule_and_on_demand_files_for_xprof_are_written(tmp_path, events):
    """A request that comes while a profile is under way is refused; one that outlives the run is written at its end."""
    config = {"skip_steps": 1, "record_steps": 2}
    trainer(tmp_path, Asks(3, 8, patient=(7, 12)), profile=config, max_num_steps=13, checkpoint={"save_at_end": False}).train()
    told = of(events, "profile")
    assert [(e["id"], e.get("first_step"), e.get("last_step")) for e in told if e["problem"] is None] == [
        (None, 3, 4),
        ("asked at 7", 8, 9),
        ("asked at 12", 13, 13),  # the last one of the run
    ]
    assert {e["id"]: e["problem"] for e in told if e["problem"]} == dict.fromkeys(
        ("asked at 3", "asked at 8"), "another profile is under way: ask again when it is written"
    )
    for event in told:
        if event["problem"] is None:
            (file,) = (tmp_path / "run" / "profile").joinpath(event["path"]).rglob("plugins/profile/*/*.xplane.pb")
            assert file.stat().st_size > 1000


def test_a_profiler_that_fails_is_reported_and_training_goes_on(tmp_path, events):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("in the way")
    made = trainer(tmp_path, profile={"record_steps": 1, "warmup_steps": 0}, max_num_steps=4, checkpoint={"save_at_end": False})
    assert int(made.train().step) == 4
    (told,) = of(events, "profile")
    assert "it could not be started" in told["problem"]
    assert not runtime.current().profiling


def test_the_files_of_a_profile_of_a_run_in_a_bucket_are_put_there_and_none_stays_here(stores, tmp_path, monkeypatch, events):
    stores["gs"].set(monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    url, written = f"{stores['gs'].url()}/run/profile", []

    def trace(folder):
        written.append(folder)
        (Path(folder) / "plugins" / "profile").mkdir(parents=True)
        (Path(folder) / "plugins" / "profile" / "a.xplane.pb").write_bytes(b"steps")

    monkeypatch.setattr(jax.profiler, "start_trace", trace)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    made = Profiler(ProfileConfig(record_steps=2, warmup_steps=1), url)
    for step in range(4):
        made.on_step_begin(SimpleNamespace(batch_index=step))
    made.on_train_end(SimpleNamespace(batch_index=4))
    place = f"{url}/step-00000001/host-0000"
    (told,) = of(events, "profile")
    assert (told["path"], told["problem"], told["first_step"], told["last_step"]) == (place, None, 2, 3)
    assert [entry.name for entry in place_of(place).list()] == ["plugins/profile/a.xplane.pb"]
    assert len(written) == 2, "one to warm up"
    assert not list(tmp_path.iterdir())
    stores["gs"].proxy.faults[:] = [Fault(".", "403")]
    made = Profiler(ProfileConfig(record_steps=1, warmup_steps=0), url)
    made.on_step_begin(SimpleNamespace(batch_index=0))
    made.on_train_end(SimpleNamespace(batch_index=1))
    assert "it could not be written" in of(events, "profile")[1]["problem"]
    assert not list(tmp_path.iterdir())


def test_no_room_for_a_temporary_folder_does_not_end_the_run(monkeypatch, events):
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    made = Profiler(ProfileConfig(record_steps=1), "gs://bucket/run/profile")
    made.on_step_begin(SimpleNamespace(batch_index=0))
    assert "it could not be started" in of(events, "profile")[0]["problem"]
    assert not runtime.current().profiling


def test_people_are_told_how_to_look_at_profiles_in_a_folder_and_in_a_bucket():
    assert "xprof --logdir /runs/a/profile (" in how_to_look("/runs/a/profile")
    assert "copy gs://b/a/profile to a FOLDER of this machine, then xprof --logdir FOLDER" in how_to_look("gs://b/a/profile")

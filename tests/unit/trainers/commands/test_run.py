"""`python -m trainers.run`: overrides, and lines that a person can read."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import trainers.commands.run
from gangway.errors import SaveFailedError
from tests.programs.mistaken import mistake
from tests.saved import saved
from trainers import settings
from trainers.config.arguments import TrainingArguments
from trainers.protocol import StopReason, TrainerOutput
from trainers.runtime import executables

CONFIG = """
name: alone
task: tests.programs.tiny:TableTask
global_batch_size: 16
max_num_steps: 12
publish_every_steps: 2
data: {sequence_length: 8, dataset: "tests.programs.tiny:numbers"}
optimizer: {name: adamw, learning_rate: 0.01}
checkpoint: {save_steps: 4}
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    (tmp_path / "alone.yaml").write_text(CONFIG)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setenv("GANGWAY_PROGRAMS", str(tmp_path / "programs"))

    def run(*overrides):
        arguments = [str(tmp_path / "alone.yaml"), f"storage={tmp_path}", *overrides]
        monkeypatch.setattr(sys, "argv", ["trainers/run.py", *arguments])
        status = trainers.commands.run.main()
        return status, capsys.readouterr()

    return run


def test_overrides_change_the_run_and_a_later_run_says_what_has_changed(run, tmp_path):
    status, printed = run("max_num_steps=4", "optimizer.schedule.name=constant")
    assert status == 0
    lines = printed.out.splitlines()
    assert lines[0].endswith(":00  reading " + lines[0].rpartition(" ")[2])
    assert "alone  1 host · 8 devices · 8,192 parameters · 128 tokens a step · 4 steps" in lines[1]
    assert "  compiling" in lines[2]
    assert "  step 4/4  loss " in printed.out
    # The same lines as those of the command that drives many hosts.
    assert "tokens/s  1 host" in printed.out
    assert "{" not in printed.out  # nothing as Python prints it
    assert printed.out.splitlines()[-1].startswith("ended (max_steps): 4 steps, loss ")
    assert printed.out.splitlines()[-1].endswith(str(saved(tmp_path / "alone", 4)))
    second_run = ("max_num_steps=6", "optimizer.schedule.name=constant", "seed=1")
    status, printed = run(*second_run)
    assert status == 0
    first, second, third = (line[9:] for line in printed.out.splitlines()[2:5])
    assert first == "goes on from step 4"
    assert second == "changed, and harmless: max_num_steps 4 -> 6"
    assert third.startswith("changed, and no longer the same experiment: seed 0 -> 1")
    assert "the state of step 4 is restored" in printed.out
    # What the console has shown, of both launches, and the settings of the second, which give the same ones.
    folder = tmp_path / "alone"
    log = (folder / "console.log").read_text()
    assert log.count("a launch begins") == 2
    assert [line for line in printed.out.splitlines()[1:-1] if line not in log] == []
    again = settings.read(str(folder / "config.yaml"))
    assert again == settings.read(str(tmp_path / "alone.yaml"), [f"storage={tmp_path}", *second_run])


def test_a_run_that_is_refused_leaves_no_folder(run, tmp_path):
    status, printed = run("task=tests.programs.tiny:Nothing", "recorders=[jsonl]")
    assert status == 2
    assert "has no 'Nothing'" in printed.err
    status, printed = run(
        "recorders=[jsonl]", "checkpoint.start_from=/nowhere", "optimizer.groups=[{pattern: nowhere, frozen: true}]"
    )
    assert status == 2
    assert "the pattern 'nowhere' is in no parameter's name" in printed.err
    assert not (tmp_path / "alone").exists()


def test_settings_of_a_class_of_ones_own_are_kept_with_its_name(tmp_path):
    text = trainers.commands.run.settings_yaml(More(name="mine", max_num_steps=1, extra=3))
    (tmp_path / "config.yaml").write_text(text)
    again = settings.read(str(tmp_path / "config.yaml"))
    assert again == More(name="mine", max_num_steps=1, extra=3, storage=os.path.abspath("runs"))


@dataclass(frozen=True, kw_only=True)
class More(TrainingArguments):
    extra: int = 1


def test_a_console_log_that_cannot_be_written_is_reported_and_the_run_goes_on(tmp_path):
    shown = []
    console = SimpleNamespace(show=shown.append, close=lambda: None)
    (tmp_path / "mine").write_text("a file")
    arguments = More(name="mine", max_num_steps=1, storage=str(tmp_path))
    assert trainers.commands.run.with_files(arguments, console, 0.0) is console
    assert "has no config.yaml and console.log" in shown[0]["message"]
    full = trainers.commands.run.LoggedConsole(console, Path("/dev/full"), 0.0)
    full.show({"ev": "note", "message": "shown"})
    full.close()
    assert shown[1]["message"] == "shown"


@pytest.mark.slow("runs a command twice")
def test_a_later_launch_loads_what_an_earlier_one_has_compiled(run, monkeypatch):
    compile_one, compiled = executables.compile_afresh, []

    def counted(lowered):
        compiled.append(lowered)
        return compile_one(lowered)

    monkeypatch.setattr(executables, "compile_afresh", counted)
    assert run("name=first")[0] == 0
    num_programs = len(compiled)
    assert num_programs > 0
    assert run("name=second")[0] == 0
    assert len(compiled) == num_programs


def test_programs_are_kept_on_this_machine_unless_the_environment_says_where(monkeypatch):
    monkeypatch.setenv("GANGWAY_PROGRAMS", "")  # so that it is put back
    monkeypatch.delenv("GANGWAY_PROGRAMS")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    for name in ("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"):
        monkeypatch.setenv(name, "")
    trainers.commands.run.keep_programs()
    assert os.environ["GANGWAY_PROGRAMS"] == os.path.expanduser("~/.cache/gangway/single/programs")
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "elsewhere"


@pytest.mark.parametrize("override", ["max_num_step=4", "optimizer.learning_rate=fast"])
def test_a_wrong_override_is_reported(run, override):
    status, printed = run(override)
    assert status == 2
    assert printed.err.startswith("error: ")


def test_an_error_in_a_users_data_is_reported_with_its_line(run):
    status, printed = run("data.dataset=tests.programs.mistaken:without_a_column")
    assert status == 1
    assert printed.err.startswith(f"error: KeyError: 'text'\nin your code: {mistake(1)}\n\nTraceback")
    assert "trainers/commands" not in printed.err
    log = printed.err.splitlines()[-1].removeprefix("(lines of your own code alone; the whole traceback is in ").removesuffix(")")
    assert "trainers/commands/run.py" in Path(log).read_text()


def test_a_state_that_could_not_be_saved_explains_itself_and_is_a_failure(capsys):
    assert trainers.commands.run.failed(SaveFailedError("no room in /data"), None) == 1
    assert capsys.readouterr().err == "error: no room in /data\n"


def test_a_module_that_ends_the_process_is_no_success(run, tmp_path, monkeypatch):
    (tmp_path / "leaving.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    status, printed = run("trainer=leaving:Trainer")
    assert status == 2
    assert "error: as it is imported, leaving ends the process, with the exit status 0" in printed.err


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (
            {"steps": 4, "train_loss": 0.25, "evaluation": {"eval/loss": 0.5}},
            "ended (max_steps): 4 steps, loss 0.25, eval/loss 0.5",
        ),
        # A trainer of one's own says what it likes.
        ({"value": 1.0}, "ended (max_steps)"),
    ],
)
def test_the_line_at_the_end(metrics, expected):
    output = TrainerOutput(
        state=None, mesh=None, checkpoint_path=None, last_save_file_name=None, stop_reason=StopReason.MAX_STEPS, metrics=metrics
    )
    assert trainers.commands.run.result(output) == expected


@pytest.mark.parametrize(("reason", "status"), [("max_steps", 0), ("early_stopped", 0), ("interrupted", 3), ("time_limit", 3)])
def test_the_exit_status_says_whether_the_training_is_over(run, monkeypatch, reason, status):
    output = TrainerOutput(None, None, None, None, StopReason(reason), {})
    limits = []
    monkeypatch.setattr(trainers.commands.run, "train", lambda arguments, began_s, limit_s: limits.append(limit_s) or output)
    assert run()[0] == run("driver.restart.retry_for_s=7")[0] == run("driver.restart.max_failures=7")[0] == status
    assert limits == [None, 7.0, None]


def test_a_trainer_of_the_protocol_alone_may_have_a_method_prepare(tmp_path):
    class Own:
        def prepare(self):
            pytest.fail("of its own, and not for the header")

    made = TrainingArguments(name="run", storage=str(tmp_path), max_num_steps=3)
    assert trainers.commands.run.header(made, Own()) == {
        "ev": "run",
        "name": "run",
        "hosts": 1,
        "devices": jax.device_count(),
        "parameters": None,
        "tokens_per_step": None,
        "max_steps": made.max_num_steps,
    }

"""A user without a home folder, a folder with a package's name, the copy of a folder that a submitted job runs in."""

import importlib
import json
import os
import pickle
import re
import stat
import subprocess
import sys
import types

import psutil
import pytest

from cluster.hosts.config import HostsConfig
from cluster.hosts.process_env import process_env
from gangway import surroundings
from gangway.config.importable import is_installed, of_a_copy
from gangway.errors import CheckpointMissingError, DataMissingError, code_missing
from gangway.surroundings import allow_for_forced_devices, ensure_home, keep_freed_memory
from gangway.user_modules import load_object
from orchestrator.config.job import ConfigError, load
from orchestrator.driver.ray_cluster import without_hooks
from tests import ROOT
from tests.programs.processes import PATIENCE_S, wait_until
from trainers.commands import evaluate, generate, reference, run
from trainers.config import monitoring

NOBODY = 2**31 - 7
"""A number that no list of users has."""


def test_a_user_who_is_a_number_gets_a_home_folder_and_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "lstat", lambda path: os.stat_result((stat.S_IFDIR | 0o700, 0, 0, 2, NOBODY, 0, 0, 0, 0, 0)))
    environ = {"PATH": "/bin", "HOME": ""}
    home = ensure_home(environ, NOBODY, str(tmp_path))
    assert environ == {"PATH": "/bin", "HOME": home, "USER": f"user-{NOBODY}"}
    assert home == str(tmp_path / f"gangway-home-{NOBODY}")
    assert stat.S_IMODE(os.stat(home).st_mode) == 0o700
    assert ensure_home({}, NOBODY, str(tmp_path)) == home  # the same one the next time


def test_a_folder_of_somebody_else_is_not_taken_for_it(tmp_path):
    (tmp_path / f"gangway-home-{NOBODY}").mkdir()  # of the user of this test
    home = ensure_home({}, NOBODY, str(tmp_path))
    assert home != str(tmp_path / f"gangway-home-{NOBODY}")
    os.rmdir(home)


def test_what_is_there_stays():
    environ = {"HOME": "/home/me", "LOGNAME": "me"}
    assert ensure_home(environ, NOBODY) is None
    assert environ == {"HOME": "/home/me", "LOGNAME": "me"}
    assert ensure_home(listed := {}) is None  # this user has an entry
    assert listed == {}


def test_a_folder_with_the_name_of_a_package_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "tensorboardX").mkdir()
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "tensorboardX", raising=False)  # another test may have imported the real one
    assert [is_installed(name) for name in ("tensorboardX", "real", "missing")] == [False, True, False]
    (problem,) = monitoring.recorder_problems(["tensorboard"], {}, "/storage")
    assert problem.startswith("recorders: 'tensorboard' needs the package tensorboardX, which is not installed: pip install ")


@pytest.fixture
def copy(tmp_path, monkeypatch):
    folder = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


NOTE = "the working folder of this job is a copy, without the files that .gitignore names: set RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1"


@pytest.mark.usefixtures("copy")
def test_what_is_not_there_in_a_submitted_job_may_have_been_left_out():
    with pytest.raises(ConfigError, match=NOTE):
        load("mine.yaml", [])
    for kind in (DataMissingError, CheckpointMissingError):
        error = kind("there is no data")
        assert str(error).startswith(f"there is no data; {NOTE}")
        assert str(pickle.loads(pickle.dumps(error))) == str(error)  # as it comes from a worker process


@pytest.mark.usefixtures("copy")
def test_a_module_that_is_not_there_may_have_been_left_out_too():
    with pytest.raises(ValueError, match=NOTE) as error:
        load_object("my_trainer_that_git_ignores:Trainer")
    missing = code_missing(error.value, "host-1", ["/code"])
    assert missing is not None
    assert NOTE in str(missing)


def test_elsewhere_nothing_is_said_of_a_copy(tmp_path, monkeypatch):
    assert str(DataMissingError("there is no data")) == "there is no data"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    os.rmdir(tmp_path / "gone")
    assert of_a_copy() == ""


def test_a_ray_of_this_machine_alone_makes_no_other_environment_for_its_workers():
    environ = {"RAY_RUNTIME_ENV_HOOK": "uv:hook", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "1", "PATH": "/bin"}
    without_hooks(environ)
    assert environ == {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "PATH": "/bin"}


CHILD = "import time; from gangway.surroundings import *; end_with_parent(); print(flush=True); time.sleep(600)"
PARENT = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_what_works_something_out_for_a_command_ends_with_it():
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environ
    )
    wait_until(lambda: not psutil.pid_exists(int(done.stdout)) or psutil.Process(int(done.stdout)).status() == "zombie")


PROGRAMS = {
    "train": ["orchestrator.gangway", "train", "config.yaml"],
    "trainers.run": ["trainers.run", "config.yaml"],
    "a host's process": ["trainers.worker"],
    "a trial of a plan": ["trainers.planning.trial"],
}
"""What trains on the processors of a machine. Each imports the user's code that it is told of."""
TAKES_MEMORY = "tests.programs.taking_memory:Arguments"


def told_by_user_code(tmp_path, program, **variables):
    """Returns how many pages come from the kernel for an array like one that was freed before, and the allocator's variables."""
    (tmp_path / "config.yaml").write_text(f"arguments: {TAKES_MEMORY}\n")
    given = {"cmd": "prepare", "arguments_class": TAKES_MEMORY, "arguments": {}}
    if program == "a trial of a plan":
        given |= {"host": 0, "num_hosts": 1, "coordinator": None}
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "EVENT_FD": "2", **variables}
    command = [sys.executable, "-m", *PROGRAMS[program]]
    done = subprocess.run(
        command,
        input=json.dumps(given) + "\n",
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    told = re.search(r"pages in the last turn: (\d+); variables: (.*)", done.stdout + done.stderr)
    assert told is not None, done.stderr
    return int(told.group(1)), json.loads(told.group(2))


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(name, marks=pytest.mark.slow("imports JAX in a process of its own")) if name == "a trial of a plan" else name
        for name in PROGRAMS
    ],
)
def test_what_computes_on_cpus_keeps_the_memory_that_it_frees_and_tells_no_child_to(program, tmp_path):
    """Else the kernel clears the pages of all temporary arrays again for each step."""
    pages, variables = told_by_user_code(tmp_path, program)
    assert pages < 100
    assert variables == {}


@pytest.mark.parametrize(
    "chosen", [{"JAX_PLATFORMS": "cuda,cpu"}, {"LD_PRELOAD": f"{surroundings.jemalloc()}", "MALLOC_CONF": "dirty_decay_ms:0"}]
)
def test_the_memory_is_not_kept_with_an_accelerator_or_where_a_user_has_chosen_otherwise(chosen, tmp_path):
    pages, variables = told_by_user_code(tmp_path, "a host's process", **chosen)
    assert pages > 1000
    assert variables == {name: value for name, value in chosen.items() if name in surroundings.OF_ALLOCATOR}


def test_a_variable_of_an_allocator_is_a_users_choice_even_if_it_is_empty(monkeypatch):
    begun = []
    monkeypatch.setattr(os, "execve", lambda *program: begun.append(program))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "trainers.run"])
    for chosen in surroundings.OF_ALLOCATOR:
        keep_freed_memory({"JAX_PLATFORMS": "cpu", chosen: ""}, "trainers.run")
    assert begun == []
    keep_freed_memory({"JAX_PLATFORMS": "cpu"}, "trainers.run")
    assert len(begun) == 1


@pytest.mark.parametrize("spec", [None, types.SimpleNamespace(submodule_search_locations=["/a/ray/without/it"])])
def test_a_machine_without_rays_library_has_the_allocator_of_its_c_library(spec, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "ray" else None)
    monkeypatch.setattr(os, "execve", None)
    environ = {"JAX_PLATFORMS": "cpu"}
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "trainers.run"])
    keep_freed_memory(environ, "trainers.run")
    assert environ == {"JAX_PLATFORMS": "cpu"}


@pytest.mark.parametrize(
    "given",
    [
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_force_host_platform_device_count=4"},
        {"JAX_NUM_CPU_DEVICES": "4"},
    ],
)
def test_a_process_with_several_forced_devices_gets_what_a_host_gets(given):
    """Its devices wait for each other: with XLA's one thread per core they would for ever."""
    of_a_host = process_env(HostsConfig(devices_per_host=4), 0, "cache")
    environ = {"JAX_PLATFORMS": "cpu", **given}
    for _ in range(2):  # the second time changes nothing
        allow_for_forced_devices(environ)
        assert environ["NPROC"] == of_a_host["NPROC"]
        assert environ["XLA_FLAGS"].split()[0] == of_a_host["XLA_FLAGS"].split()[0]
        assert environ["XLA_FLAGS"].split()[1:] == given.get("XLA_FLAGS", "").split()


@pytest.mark.parametrize(
    "given",
    [
        {"JAX_PLATFORMS": "cpu"},
        {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
        {"JAX_PLATFORMS": "cuda,cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
    ],
)
def test_a_process_with_one_device_or_an_accelerator_stays_as_it_is(given):
    environ = dict(given)
    allow_for_forced_devices(environ)
    assert environ == given


def test_what_the_environment_says_of_threads_comes_first():
    asked = {
        "NPROC": "7",
        "XLA_FLAGS": "--xla_cpu_enable_concurrency_optimized_scheduler=true --xla_force_host_platform_device_count=4",
    }
    environ = {"JAX_PLATFORMS": "cpu", **asked}
    allow_for_forced_devices(environ)
    assert environ == {"JAX_PLATFORMS": "cpu", **asked}


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (run, ["none.yaml"]),
        (evaluate, ["none"]),
        (generate, ["none", "--prompt", "a"]),
        (reference, ["none.yaml", "--output", "none"]),
    ],
)
def test_each_command_that_computes_gets_threads_for_its_devices(command, arguments, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["command", *arguments])
    assert command.main(*([] if command is run else [arguments])) == 2
    assert os.environ["NPROC"] == "32"

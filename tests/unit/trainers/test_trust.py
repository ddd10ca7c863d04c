"""Code that a checkpoint names: gangway's own, or allowed by its exact name, and never from inside the checkpoint. What a module
may do as it is imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import warnings
from uuid import uuid4

import pytest

from gangway import user_modules
from gangway.errors import ModuleError
from gangway.user_modules import UntrustedCodeError, load_object, named_by_data, note_names
from tests import ROOT
from tests.programs.processes import PATIENCE_S


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with a module of the user's, and a checkpoint that brings modules of its own."""
    for place in ("mine", "model", "model/inner"):
        folder = tmp_path / place
        folder.mkdir()
        marker = tmp_path / f"ran-{folder.name}"
        (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Task: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    for name in ("mine", "model"):
        for module in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
            del sys.modules[module]


def ran(folder):
    return sorted(path.name for path in folder.glob("ran-*"))


def test_nothing_is_checked_that_the_user_has_written(here):
    assert load_object("model.evil:Task").__name__ == "Task"


@pytest.mark.parametrize("allowed", [(), ("mine.evil:task",), ("mine.evil",), ("mine.evil:Task.x",), ("model.evil:Task",)])
def test_what_nobody_has_allowed_by_its_exact_name_is_not_imported(here, allowed):
    with named_by_data("model", allowed), pytest.raises(UntrustedCodeError, match=r"--trust-code mine\.evil:Task$"):
        load_object("mine.evil:Task")
    assert ran(here) == []


def test_all_names_that_nobody_has_allowed_are_in_one_error(here):
    with named_by_data("model", ["mine.good:Task"]):
        note_names({"task": "mine.evil:Task", "more": ["trainers.a:B", "no name", {"x": "mine.good:Task", "y": "mine.b:C"}]})
        with pytest.raises(
            UntrustedCodeError, match=r": mine\.evil:Task, mine\.b:C\. .*: --trust-code mine\.evil:Task --trust-code mine\.b:C$"
        ):
            load_object("mine.evil:Task")
    assert ran(here) == []


def test_what_is_allowed_is_imported(here):
    with named_by_data("model", ["mine.evil:Task"]):
        assert load_object("mine.evil:Task").__name__ == "Task"
    assert ran(here) == ["ran-mine"]


@pytest.mark.parametrize("name", ["model.evil:Task", "model.inner.evil:Task"])
@pytest.mark.parametrize("source", ["model", "./model/", "link", "model/checkpoints/8", "model/best", "link/best"])
def test_what_lies_inside_the_checkpoint_is_not_imported_even_if_it_is_allowed(here, name, source):
    (here / "link").symlink_to("model")
    (here / "model" / "checkpoints" / "8").mkdir(parents=True)
    with (
        named_by_data(source, [name]),
        pytest.raises(UntrustedCodeError, match="code is never taken from there"),
    ):
        load_object(name)
    assert ran(here) == []


def test_a_package_of_the_users_that_reaches_into_the_checkpoint_is_not_followed(here):
    (here / "mine" / "sub").symlink_to(here / "model" / "inner")
    with named_by_data("model", ["mine.sub.evil:Task"]), pytest.raises(UntrustedCodeError, match="is inside of"):
        load_object("mine.sub.evil:Task")
    assert ran(here) == []


def test_no_module_is_found_in_the_checkpoint_if_one_works_there(here, monkeypatch):
    monkeypatch.chdir(here / "model")
    monkeypatch.setattr(sys, "path", ["", str(here / "model" / "inner"), *sys.path])
    with named_by_data(".", ["evil:Task"]), pytest.raises(ValueError, match="no module named 'evil'"):
        load_object("evil:Task")
    assert sys.path[0] == ""
    assert ran(here) == []


def test_gangways_own_may_be_named_and_nothing_that_it_has_only_imported(here):
    with named_by_data("model"):
        assert load_object("trainers.tasks.causal_lm:CausalLMTask").__name__ == "CausalLMTask"
        for name in ("trainers.settings:os", "trainers.checkpoint.layout:suppress"):
            with pytest.raises(UntrustedCodeError, match="is nothing of gangway's"):
                load_object(name)
    assert user_modules._trust.get() is None


ENDS, CHANGES = "ends the process, with the exit status", "must only define things"
DOES_MORE = [
    ("import sys; sys.exit(0)", f"{ENDS} 0 \\(.*mine_\\w+.py, line 1, in <module>: import sys; sys.exit\\(0\\)\\)"),
    ("raise SystemExit('my words')", f"{ENDS} my words"),
    ("import argparse; p = argparse.ArgumentParser(); p.add_argument('--x', required=True); p.parse_args()", f"{ENDS} 2"),
    ("import os; os.chdir('/')", r"mine_\w+.py changes the working folder to /"),
    ("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", "takes SIGTERM, with which a run is stopped"),
    ("import warnings; warnings.simplefilter('error')", "makes errors of the warnings of all modules"),
    ("import threading, time; threading.Thread(target=time.sleep, args=(60,), name='mine').start()", r"a thread .* \(mine\)"),
    ("import os; os.environ['XLA_FLAGS'] = '--xla_a=1'", "sets XLA_FLAGS"),
    (
        "import os; os.environ.pop('JAX_PLATFORMS', None); os.environ['JAX_ENABLE_X64'] = '1'",
        "sets JAX_ENABLE_X64, JAX_PLATFORMS",
    ),
]


def surroundings():
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    return os.getcwd(), handlers, [*warnings.filters], {**os.environ}, threading.Thread.start, [*sys.argv]


@pytest.mark.parametrize(("text", "said"), DOES_MORE)
def test_a_module_that_does_more_than_define_is_refused_each_time_and_leaves_nothing(tmp_path, monkeypatch, text, said):
    name = f"mine_{uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(f"{text}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    (tmp_path / f"{name}_first.py").write_text(f"import {name}\n")
    before = surroundings()
    with pytest.raises(ModuleError, match=f"as it is imported, .*{CHANGES}"):
        load_object(f"{name}_first:Thing")  # of a module that it imports, which stays imported
    assert surroundings() == before
    with pytest.raises(ModuleError):
        load_object(f"{name}_first:Thing")
    sys.modules.pop(name, None)
    for _ in range(2):
        with pytest.raises(ModuleError, match=f"as it is imported, .*{said}.*{CHANGES}"):
            load_object(f"{name}:Thing")
        assert surroundings() == before


def test_a_thread_of_a_refused_module_does_not_hold_the_process(tmp_path):
    text = "import threading, time; threading.Thread(target=time.sleep, args=(3600,)).start()"
    (tmp_path / "holding.py").write_text(text)
    program = (
        "from gangway.user_modules import load_object\ntry: load_object('holding:Thing')\nexcept ValueError: print('refused')"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=env)
    assert (ran.returncode, ran.stdout) == (0, "refused\n"), ran.stderr


def test_a_module_is_imported_without_the_words_of_the_command_and_prints_to_standard_error(tmp_path, monkeypatch, capsys):
    name = f"mine_{uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(
        "import argparse, sys, threading, warnings\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "argparse.ArgumentParser().parse_args()\n"
        "print('hello')\n"
        "pool = ThreadPoolExecutor(1)\n"
        "pool.submit(int).result()\n"
        "short = threading.Thread(target=int)\n"
        "short.start()\n"
        "short.join()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "warnings.filterwarnings('ignore')\n"
        "warnings.filterwarnings('error', module=__name__)\n"
        "Thing = sys.argv\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["gangway", "train", "config.yaml"])
    with warnings.catch_warnings():
        thing = load_object(f"{name}:Thing")
    assert thing == ["gangway", "train", "config.yaml"]  # the same list, as it is again
    assert capsys.readouterr() == ("", "hello\n")

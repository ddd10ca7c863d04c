"""Code that a checkpoint names: gangway's own, or allowed by its exact name, and never from inside the checkpoint."""

from __future__ import annotations

import sys

import pytest

from gangway.config import importable
from gangway.config.importable import UntrustedCodeError, named_by_data
from trainers.config.arguments import load_object


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


def test_what_is_allowed_is_imported(here):
    with named_by_data("model", ["mine.evil:Task"]):
        assert load_object("mine.evil:Task").__name__ == "Task"
    assert ran(here) == ["ran-mine"]


@pytest.mark.parametrize("name", ["model.evil:Task", "model.inner.evil:Task"])
@pytest.mark.parametrize("source", ["model", "./model/", "link", "model/checkpoints/8"])
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
    assert importable._trust.get() is None

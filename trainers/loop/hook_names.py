"""Finds methods that were surely meant as hooks, and that nothing would ever call."""

from __future__ import annotations

from typing import Any

from trainers.config.section import did_you_mean
from trainers.errors import UsageError

ELSEWHERE = {
    "train_step": "define the loss in a task (`Task.loss`), or override configure_functions",
    "forward_backward_step": "override forward_backward, which makes the gradients of a micro-batch; the loss is that of a task",
    "start_training_hook": "the name is on_training_start here",
    "start_evaluation_hook": "the name is on_evaluation_start here",
    "_preprocess_batch_input": "override prepare_batch, which gets the state, or preprocess_batch, which runs ahead on the host",
    "create_grain_collect_function": "override build_data_collate_info",
    "create_tfds_collect_function": "override build_data_collate_info",
}
"""Methods that a subclass would override in EasyDeL, fairseq2 or VeOmni, and what takes their place here."""
STEPS = frozenset({"train_step", "forward_backward_step"})
PREFIXES = ("on_", "build_", "configure_", "freeze_", "pre", "post")
"""The names of hooks and of replaceable parts begin with these."""
NEAR = 0.85
"""The similarity from which on a name is taken for a misspelt one."""


def check_hook_names(trainer: Any) -> None:
    """Raises UsageError for methods of a subclass that nothing would call: hooks of other systems that have another name here,
    and names that are nearly those of a hook. Other names that begin with `_` are free."""
    ours = {name for base in trainer.__mro__ if _is_ours(base.__module__) for name in vars(base)}
    names = {name for base in trainer.__mro__[:-1] for name, value in vars(base).items() if callable(value)} - ours
    # The user's own train and eval functions may be made of methods of these names.
    if not _is_ours(trainer.configure_functions.__module__):
        names -= STEPS
    problems = [f"{name}: {problem}" for name in sorted(names) if (problem := _problem(name, ours))]
    if problems:
        lines = "\n  ".join(problems)
        raise UsageError(f"{trainer.__name__} has methods that nothing would call:\n  {lines}")


def _problem(name: str, ours: set[str]) -> str:
    """Returns what is wrong with a method of this name in a subclass; empty if nothing is."""
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    if name.startswith("_"):
        return ""
    hooks = [known for known in ours if known.startswith(PREFIXES)]
    near = did_you_mean(name, hooks, cutoff=NEAR)
    return f"it is no hook{near} (a helper of another purpose has a name that begins with _)" if near else ""


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "trainers"

"""Compares runs that should be equal, and names the part of the user's code at fault where they differ. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Batches = Mapping[int, Mapping[str, str]]
"""The digests of rows, by batch and row."""
SHOWN = 5
Fingerprints = Mapping[int, Mapping[str, Any]]
"""The fingerprints of all leaves of the state, by step of the checkpoint and name."""


@dataclass(frozen=True)
class Evidence:
    """The files of a run that are compared."""

    batches: Batches = field(default_factory=dict)
    fingerprints: Fingerprints = field(default_factory=dict)
    losses: Mapping[int, float] = field(default_factory=dict)
    """The published losses by step."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    """What its last checkpoint records of what it has learned from (`trainers.data.identity`)."""


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs."""

    what: str
    """data or state"""
    text: str


@dataclass(frozen=True)
class Finding:
    """`good` is None for what was not tried; `at_fault` is data, step, restore or resize."""

    claim: str
    good: bool | None
    text: str = ""
    at_fault: str | None = None


def difference(first: Evidence, second: Evidence) -> Difference | None:
    """Returns the first difference; None if the runs are equal as far as was recorded."""
    # The data first: all other differences may follow from them.
    if differing := first_difference(first.batches, second.batches, row_order):
        batch, row = differing
        return Difference("data", f"batch {batch} differs in row {row}")
    if differing_leaf := first_difference(first.fingerprints, second.fingerprints):
        step, leaf = differing_leaf
        return Difference("state", f"first difference at step {step} in {leaf}")
    for digest in ("samples_digest", "params_digest"):
        if first.summary[digest] != second.summary[digest]:
            return Difference("state", f"{digest} differs at the end: {first.summary[digest]} and {second.summary[digest]}")
    return None


def changed_data(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Returns which files of a job were others when it ran again, or its tokenizer; empty: none that its runs have recorded. (How
    many examples its own function makes of them is what is verified.)"""
    before, now = first.get("files", {}), second.get("files", {})
    names = sorted(before.keys() ^ now.keys())
    for name in sorted(before.keys() & now.keys()):
        digests = {before[name]["digest"], now[name]["digest"]} - {""}  # a short run may not have made them all
        if before[name]["num_bytes"] != now[name]["num_bytes"] or len(digests) > 1:
            names.append(name)
    others = [key for key in ("tokenizer", "many") if first.get(key) != second.get(key)]
    return ", ".join([*names[:SHOWN], *([f"{len(names) - SHOWN} more files"] if len(names) > SHOWN else []), *others])


def first_difference(
    first: Mapping[int, Mapping[str, Any]], second: Mapping[int, Mapping[str, Any]], order: Callable[[str], Any] = str
) -> tuple[int, str] | None:
    """Returns the number (of a batch, a step) and the name (of a row, a leaf) of the first difference. Numbers that only one of
    the two has do not count, such as batches that were drawn ahead of a stop."""
    for number in sorted(set(first) & set(second)):
        for name in sorted({**first[number], **second[number]}, key=order):
            if first[number].get(name) != second[number].get(name):
                return number, name
    return None


def row_order(row: str) -> list[int]:
    return [int(part) for part in row.split(maxsplit=1)[0].split(".")]


def loss_difference(first: Mapping[int, float], second: Mapping[int, float]) -> tuple[int, float] | None:
    """Returns (step, relative difference) where the published losses differ most; None if the runs have none in common that is
    a mean over the same steps: a run that stopped between two publishes has others than one that did not."""
    shared = _stretches(first) & _stretches(second)
    apart = [(abs(first[step] - second[step]) / max(abs(first[step]), 1e-12), step) for _, step in shared]
    return (max(apart)[1], max(apart)[0]) if apart else None


def _stretches(losses: Mapping[int, float]) -> set[tuple[int, int]]:
    """Returns (the step of the publish before, that of the publish) of each loss, which is the mean over the steps between."""
    return set(itertools.pairwise((0, *sorted(losses))))


# ---------------------------------------------------------------------- the judgements


def judge_twice(first: Evidence, second: Evidence, where: Mapping[str, str]) -> Finding:
    """Two undisturbed runs. `where` names the user's `dataset`, `task` and `trainer`."""
    claim = "the same run twice gives the same samples, parameters and optimizer state, bit for bit"
    diff = difference(first, second)
    if diff is None:
        return Finding(claim, True)
    return _at_fault(
        claim,
        diff,
        data="between two undisturbed runs: a batch is not a pure function of (seed, batch index). Look at "
        f"data.dataset = {where['dataset']}: randomness without the seed, the clock, the order of files or threads",
        step=f"between two undisturbed runs on the same batches. Look at task = {where['task']} and "
        f"trainer = {where['trainer']}: randomness that is not of (seed, step), the clock, the host's name; or operations of "
        "the device that are not deterministic",
    )


def judge_resumed(plain: Evidence, killed: Evidence, where: Mapping[str, str]) -> Finding:
    """Compares an undisturbed run with one in which a process was killed after a checkpoint."""
    claim = "killed and resumed, it ends as if nothing had happened, bit for bit"
    resumed = [incident["resumed_step"] for incident in killed.summary["incidents"]]
    if not any(resumed):
        return Finding(claim, False, f"the run was not resumed from a checkpoint (resumed from: {resumed})", "restore")
    diff = difference(plain, killed)
    if diff is None:
        return Finding(claim, True, f"resumed from step {resumed[0]}")
    return _at_fault(
        claim,
        diff,
        data=f"after the run was resumed from step {resumed[0]}: what a batch holds depends on what the process did before. Look "
        f"at data.dataset = {where['dataset']}: state in it, such as an iterator or a counter",
        restore=f"after the run was resumed from step {resumed[0]}, on the same batches: something that training depends on is "
        f"not in the state that is saved. Look at trainer = {where['trainer']} and task = {where['task']}: attributes that "
        "change while training, of the trainer, the task or its callbacks",
    )


def judge_resized(plain: Evidence, resized: Evidence, tolerance: float, where: Mapping[str, str]) -> Finding:
    """Compares an undisturbed run with one that was stopped half-way and went on with fewer hosts. Its losses may differ a
    little: floating-point sums depend on the number of hosts."""
    claim = f"gone on with on {_hosts(resized)} hosts, it sees the same samples, and its losses stay within {tolerance:.1%}"
    if differing := first_difference(plain.batches, resized.batches, row_order):
        text = (
            f"data: batch {differing[0]} differs in row {differing[1]} on another number of hosts: what it holds depends on who "
            f"reads it. Look at data.dataset = {where['dataset']}"
        )
        return Finding(claim, False, text, "data")
    if plain.summary["samples_digest"] != resized.summary["samples_digest"]:
        return Finding(claim, False, "data: other samples were trained on, on another number of hosts", "data")
    apart = loss_difference(plain.losses, resized.losses)
    if apart is not None and apart[1] > tolerance:
        text = (
            f"step: at step {apart[0]} the losses are {apart[1]:.2%} apart: the result depends on the number of hosts. Look at "
            f"task = {where['task']}: a loss has to be a sum over examples and a number of targets"
        )
        return Finding(claim, False, text, "step")
    return Finding(claim, True, "" if apart is None else f"at most {apart[1]:.2g} apart, at step {apart[0]}")


def judge_replayed(resized: Evidence, replayed: Evidence, where: Mapping[str, str]) -> Finding:
    """Compares a run that was resized with an undisturbed run along its lineage."""
    claim = f"the lineage ({_hosts(resized)} hosts) gives the same again, bit for bit"
    diff = difference(resized, replayed)
    if diff is None:
        return Finding(claim, True)
    between = "between a resized run and its replay. Look at"
    return _at_fault(claim, diff, data=f"{between} {where['dataset']}", restore=f"{between} {where['trainer']}")


def _at_fault(claim: str, diff: Difference, **why: str) -> Finding:
    """The finding of two runs that differ. The data are at fault if they differ, else what the other reason is named by."""
    what = next(name for name in why if (name == "data") == (diff.what == "data"))
    return Finding(claim, False, f"{what}: {diff.text} {why[what]}", what)


def _hosts(evidence: Evidence) -> str:
    return " then ".join(str(segment["num_hosts"]) for segment in evidence.summary.get("lineage") or ())


def passed(findings: Sequence[Finding]) -> bool:
    return all(finding.good is not False for finding in findings)

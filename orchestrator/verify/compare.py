"""What two runs that should be equal have in common, and which part of the user's code is at fault where they are not. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Batches = Mapping[int, Mapping[str, str]]
"""Digests of rows, by batch and row."""
Fingerprints = Mapping[int, Mapping[str, Any]]
"""Of every leaf of the state, by step of the checkpoint and name."""


@dataclass(frozen=True)
class Evidence:
    """What a run left."""

    batches: Batches = field(default_factory=dict)
    fingerprints: Fingerprints = field(default_factory=dict)
    losses: Mapping[int, float] = field(default_factory=dict)
    """By step, as they were published."""
    summary: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """The first between two runs."""

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


def difference(one: Evidence, other: Evidence) -> Difference | None:
    """None if the runs are equal as far as was recorded. What they were fed is looked at first: all else follows from it."""
    if found := different_batch(one.batches, other.batches):
        batch, row = found
        return Difference("data", f"batch {batch} differs in row {row}")
    if place := different_leaf(one.fingerprints, other.fingerprints):
        step, leaf = place
        return Difference("state", f"first difference at step {step} in {leaf}")
    for digest in ("samples_digest", "params_digest"):
        if one.summary[digest] != other.summary[digest]:
            return Difference("state", f"{digest} differs at the end: {one.summary[digest]} and {other.summary[digest]}")
    return None


def different_batch(one: Batches, other: Batches) -> tuple[int, str] | None:
    """(batch, row) of the first difference. Batches that only one of them drew (ahead of a stop) do not count."""
    for batch in sorted(set(one) & set(other)):
        rows = {**one[batch], **other[batch]}
        for row in sorted(rows, key=_row_order):
            if one[batch].get(row) != other[batch].get(row):
                return batch, row
    return None


def _row_order(row: str) -> list[int]:
    return [int(part) for part in row.split(maxsplit=1)[0].split(".")]


def different_leaf(one: Fingerprints, other: Fingerprints) -> tuple[int, str] | None:
    """(step, leaf) of the first difference, over the checkpoints that both have."""
    for step in sorted(set(one) & set(other)):
        for leaf in sorted({**one[step], **other[step]}):
            if one[step].get(leaf) != other[step].get(leaf):
                return step, leaf
    return None


def loss_difference(one: Mapping[int, float], other: Mapping[int, float]) -> tuple[int, float] | None:
    """(step, how much, relative to the loss) where the published losses are furthest apart; None if no step has both."""
    apart = [(abs(one[step] - other[step]) / max(abs(one[step]), 1e-12), step) for step in set(one) & set(other)]
    return (max(apart)[1], max(apart)[0]) if apart else None


# ---------------------------------------------------------------------- the judgements


def judge_twice(one: Evidence, other: Evidence, where: Mapping[str, str]) -> Finding:
    """Two undisturbed runs. `where` names the user's `dataset`, `task` and `trainer`."""
    claim = "the same run twice gives the same samples, parameters and optimizer state, bit for bit"
    found = difference(one, other)
    if found is None:
        return Finding(claim, True)
    if found.what == "data":
        text = (
            f"data: {found.text} between two undisturbed runs: a batch is not a pure function of (seed, batch index). Look at "
            f"data.dataset = {where['dataset']}: randomness without the seed, the clock, the order of files or threads"
        )
        return Finding(claim, False, text, "data")
    text = (
        f"step: {found.text} between two undisturbed runs on the same batches. Look at task = {where['task']} and "
        f"trainer = {where['trainer']}: randomness that is not of (seed, step), the clock, the host's name; or operations of "
        "the device that are not deterministic"
    )
    return Finding(claim, False, text, "step")


def judge_resumed(plain: Evidence, killed: Evidence, where: Mapping[str, str]) -> Finding:
    """An undisturbed run, and one in which a process was killed after a checkpoint."""
    claim = "killed and resumed, it ends as if nothing had happened, bit for bit"
    resumed = [incident["resumed_step"] for incident in killed.summary["incidents"]]
    if not any(resumed):
        return Finding(claim, False, f"the run was not resumed from a checkpoint (resumed from: {resumed})", "restore")
    found = difference(plain, killed)
    if found is None:
        return Finding(claim, True, f"resumed from step {resumed[0]}")
    if found.what == "data":
        text = (
            f"data: {found.text} after the run was resumed from step {resumed[0]}: what a batch holds depends on what the "
            f"process did before. Look at data.dataset = {where['dataset']}: state in it, such as an iterator or a counter"
        )
        return Finding(claim, False, text, "data")
    text = (
        f"restore: {found.text} after the run was resumed from step {resumed[0]}, on the same batches: something that training "
        f"depends on is not in the state that is saved. Look at trainer = {where['trainer']} and task = {where['task']}: "
        "attributes that change while training, of the trainer, the task or its callbacks"
    )
    return Finding(claim, False, text, "restore")


def judge_resized(plain: Evidence, resized: Evidence, tolerance: float, where: Mapping[str, str]) -> Finding:
    """An undisturbed run, and one that was stopped half-way and went on with fewer hosts: floating-point sums differ."""
    claim = f"gone on with on {_hosts(resized)} hosts, it sees the same samples, and its losses stay within {tolerance:.1%}"
    if found := different_batch(plain.batches, resized.batches):
        text = (
            f"data: batch {found[0]} differs in row {found[1]} on another number of hosts: what it holds depends on who reads "
            f"it. Look at data.dataset = {where['dataset']}"
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
    """A run that was resized, and an undisturbed one along its lineage."""
    claim = f"the lineage ({_hosts(resized)} hosts) gives the same again, bit for bit"
    found = difference(resized, replayed)
    if found is None:
        return Finding(claim, True)
    at_fault = "data" if found.what == "data" else "restore"
    look = where["dataset"] if found.what == "data" else where["trainer"]
    return Finding(claim, False, f"{at_fault}: {found.text} between a resized run and its replay. Look at {look}", at_fault)


def _hosts(evidence: Evidence) -> str:
    return " then ".join(str(stretch["num_hosts"]) for stretch in evidence.summary.get("lineage") or ())


def passed(findings: Sequence[Finding]) -> bool:
    return all(finding.good is not False for finding in findings)

"""The sections for what is recorded of a run, the recorders that it may name, and bad batches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gangway.config.conversion import CheckedSection
from gangway.config.importable import is_installed
from gangway.config.section import PATH, Section, did_you_mean, not_positive, repeated, require, too_small


@dataclass(frozen=True, kw_only=True)
class AnomalyConfig(CheckedSection):
    """What to do about a batch whose loss or gradient is not finite, or whose loss is a spike. Its update is never applied."""

    non_finite: Literal["raise", "skip", "rollback"] = "skip"
    """raise: the run fails; skip: it goes on with the next batch; rollback: it goes back to a checkpoint before the batch. Also
    for an update that makes parameters or moments infinite or NaN: it was applied, and `skip` goes back too."""
    loss_spike: Literal["off", "raise", "skip", "rollback"] = "off"
    """off: spikes are not looked for. raise, skip and rollback: as in `non_finite`."""
    spike_zscore: float = 6.0
    """A spike is a loss this many standard deviations above its running mean, both over the updates that were applied."""
    spike_warmup_steps: int = 50
    """The number of updates before the first one that can be a spike."""
    # An average over about 1 / (1 - 0.98) = 50 losses: as many as the warm-up waits for.
    spike_decay: float = 0.98
    """The decay of the running mean and variance: the weight of the past at each update."""
    skip_before: int = 0
    """How many batches before the offending one a rollback leaves out with it."""
    max_skipped: int = 100
    """The limit for skipped batches among any `skipped_window_batches` in a row. With one more the run fails: the fault is not
    in the data."""
    skipped_window_batches: int = 10_000
    """Batches that were skipped longer ago do not count: a run of any length may meet a bad batch now and then."""

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 0, "skip_before", "max_skipped")
        yield from too_small(self, 1, "spike_warmup_steps", "skipped_window_batches")
        yield from not_positive(self, "spike_zscore")
        if not 0 < self.spike_decay < 1:
            yield f"spike_decay = {self.spike_decay}: expected 0 < spike_decay < 1"


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(Section):
    """Further metrics. See `docs/metrics.md`."""

    per_parameter_grad_norm: bool = False
    """Whether the norm of the gradient of each parameter is published, too: `grad_norm/NAME`."""
    running_means: tuple[str, ...] = ()
    """The metrics NAME, such as `accuracy`, whose mean since the run began is published as `mean_NAME`."""
    peak_flops_per_s: float | None = None
    """The peak of one device, for `mfu`; default: the known one of its kind (`trainers/metrics/peak_flops.py`)."""

    def __post_init__(self):
        require(not repeated(self.running_means), f"running_means = {list(self.running_means)}: expected each name once")
        if self.peak_flops_per_s is not None:
            require(self.peak_flops_per_s > 0, f"peak_flops_per_s = {self.peak_flops_per_s}: expected a positive number")


@dataclass(frozen=True, kw_only=True)
class DistributionConfig(CheckedSection):
    """Histogram, mean, deviation and extremes of parameters and their gradients, for the recorders that take them."""

    pattern: str | None = None
    """Which parameters: a regular expression that is searched in names such as `layers/query`; `.`: all; null: none."""
    every_steps: int = 100
    """They are recorded at each step that is a multiple of this: a multiple of `publish_every_steps`."""
    bins: int = 64
    """The bins of a histogram, all of one width."""

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 1, "every_steps")
        yield from too_small(self, 2, "bins")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            yield f"pattern = {self.pattern!r}: expected a regular expression, or null ({error})"


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(CheckedSection):
    """Windows of steps that JAX's profiler records; more at any time by `gangway profile`.
    Skips, then `repeat` times: waits, warms up, records."""

    record_steps: int | None = None
    """null: nothing is recorded on schedule."""
    skip_steps: int = 0
    """The number of steps of this process to skip at first."""
    wait_steps: int = 0
    """The steps that are let pass before the warm-up, each time."""
    warmup_steps: int = 1
    """Steps that are traced and thrown away, so that the cost of starting the tracer is not in the record."""
    repeat: int = 1
    """How many windows are recorded."""
    hosts: tuple[int, ...] = (0,)
    """Which hosts record, by number."""
    folder: str = "profile"
    """Where profiles are written, on every host: a folder, relative to that of the run or absolute."""

    def _problems(self) -> Iterator[str]:
        if not self.folder or "://" in self.folder:
            yield f"folder = {self.folder!r}: expected a folder, relative to that of the run or absolute"
        yield from too_small(self, 1, "record_steps", "repeat")
        yield from too_small(self, 0, "skip_steps", "wait_steps", "warmup_steps")
        if self.repeat > 1 and self.wait_steps < 2:
            yield (
                f"wait_steps = {self.wait_steps}: expected at least 2 with repeat = {self.repeat}: the last steps of a "
                "window are still running when the next ones are begun"
            )
        if not self.hosts or min(self.hosts) < 0:
            yield f"hosts = {list(self.hosts)}: expected at least one host, counted from 0"


BUILT_IN = {
    "jsonl": "trainers.recorders.jsonl:JsonLines",
    "tensorboard": "trainers.recorders.tensorboard:TensorBoard",
    "wandb": "trainers.recorders.wandb:WeightsAndBiases",
}
NEEDS = {"tensorboard": ("tensorboardX", "tensorboardX"), "wandb": ("wandb", "gangway[wandb]")}
"""(module, what to install)."""


def recorder_problems(names: Sequence[str], folders: Mapping[str, str], storage: str) -> Iterator[str]:
    """Yields what is wrong with the recorders that a configuration names, and with the folders that it gives them."""
    for name, folder in folders.items():
        if name not in names:
            yield f"recorder_folders.{name}: expected one of recorders ({', '.join(names) or 'none'}){did_you_mean(name, names)}"
        elif not folder or "://" in folder:
            yield f"recorder_folders.{name} = {folder!r}: expected a folder, relative to that of the run or absolute"
    on_storage = [name for name in names if not folders.get(name, "").startswith("/")]
    if "://" in storage and (appending := [name for name in on_storage if name in ("jsonl", "tensorboard")]):
        yield (
            f"recorders: {', '.join(appending)} append to files, which {storage} cannot do: set storage to a local or mounted "
            "folder, give them an absolute folder (recorder_folders), or leave them out"
        )
    for name in names:
        if name not in BUILT_IN and not PATH.fullmatch(name):
            allowed = ", ".join([*BUILT_IN, "package.module:Class"])
            yield f"recorders: {name!r}: expected one of {allowed}{did_you_mean(name, BUILT_IN)}"
        module, install = NEEDS.get(name, (None, None))
        if module is not None and not is_installed(module):
            how = f"pip install '{install}', or leave it out"
            yield f"recorders: {name!r} needs the package {module}, which is not installed: {how}"
    if len(set(names)) < len(names):
        yield f"recorders = {list(names)}: expected each once"

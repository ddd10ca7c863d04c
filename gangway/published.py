"""What is published: the names that every run has, which others a console shows, and the form of a distribution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

SYSTEM = frozenset(
    (
        *("loss", "mean_loss", "perplexity", "accuracy", "z_loss", "load_balancing_loss", "router_z_loss", "busiest_expert"),
        *("router_entropy", "grad_norm", "learning_rate", "skipped_batches", "loss_scale", "lost_updates", "epoch"),
        *("tokens", "samples", "total_tokens", "total_samples", "total_skipped_examples", "cut_examples"),
        *("packing_efficiency", "overlong_documents", "lost_tokens"),
        *("step_time_s", "tokens_per_s", "tokens_per_s_per_device", "samples_per_s", "flops_per_token"),
        *("tflops_per_s_per_device", "mfu", "mfu_of_fp8_peak", "device_memory_bytes", "device_memory_peak_bytes"),
        *("host_cpu_percent", "host_memory_bytes", "host_memory_total_bytes", "process_memory_bytes"),
        *("host_disk_read_bytes_per_s", "host_disk_written_bytes_per_s"),
        *("host_network_received_bytes_per_s", "host_network_sent_bytes_per_s"),
    )
)
"""The names that the system publishes."""
SYSTEM_PREFIXES = (
    *("loss/", "total_tokens/", "epoch/", "grad_norm/", "learning_rate/"),
    *("goodput/", "launch/", "incidents/", "system/", "counted/"),
)
"""What its other names begin with, such as `loss/SOURCE`."""
MEAN = "mean_"
"""What the running mean of a metric begins with."""
RATES = ("_seconds", "_samples_per_s", "_tokens_per_s", "_tflops_per_s_per_device")
"""How fast an evaluation was."""
FIRST = ("eval_loss", "eval_accuracy", "eval_perplexity")
DEFAULT_UNIT = "eval_"


def own(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of a training that are the user's: parts of a loss, and what hooks have added."""
    return {
        name: value
        for name, value in metrics.items()
        if name not in SYSTEM
        and not name.startswith(SYSTEM_PREFIXES)
        and not (name.startswith(MEAN) and name.removeprefix(MEAN) in metrics)
    }


def of_task(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of a training that say how well the task is learned, beside its loss: the accuracy, and `own`."""
    return {name: metrics[name] for name in ("accuracy",) if name in metrics} | own(metrics)


def of_evaluation(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of all units, by the names to show: those of the default unit, without `eval_`, come first."""
    measured = {name: value for name, value in metrics.items() if not name.endswith(RATES)}
    names = [*(name for name in FIRST if name in measured), *(name for name in measured if name not in FIRST)]
    names.sort(key=lambda name: not name.startswith(DEFAULT_UNIT))
    return {name.removeprefix(DEFAULT_UNIT): measured[name] for name in names}


def counted(num_tokens: float | None, num_samples: float | None) -> tuple[float, str] | None:
    """Returns an amount, or a rate, and what is counted: examples where each of them is one thing, such as an image, and so has
    one token; else tokens. None if neither is known."""
    if num_tokens is None or num_tokens == num_samples:
        return None if num_samples is None else (num_samples, "examples")
    return num_tokens, "tokens"


def shown(metrics: Mapping[str, float]) -> list[str]:
    """Returns `name value` for each."""
    return [f"{name} {number(value)}" for name, value in metrics.items()]


def number(value: float) -> str:
    """0.1234 · 1.235e+04."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


class Distribution(NamedTuple):
    """The distribution of the values of one array: `counts` are those of equal bins from `min` to `max`."""

    mean: float
    std: float
    min: float
    max: float
    counts: tuple[int, ...]

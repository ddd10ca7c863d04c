"""Which of the published metrics a console shows beside those that every run has: a user's own, and those of evaluations."""

from __future__ import annotations

from collections.abc import Mapping

SYSTEM = frozenset(
    (
        *("loss", "mean_loss", "perplexity", "accuracy", "z_loss", "load_balancing_loss", "router_z_loss", "busiest_expert"),
        *("router_entropy", "grad_norm", "learning_rate", "skipped_batches", "loss_scale", "epoch"),
        *("tokens", "samples", "total_tokens", "total_samples", "total_skipped_examples", "cut_examples"),
        *("step_time_s", "tokens_per_s", "tokens_per_s_per_device", "samples_per_s", "flops_per_token"),
        *("tflops_per_s_per_device", "mfu", "device_memory_bytes", "device_memory_peak_bytes"),
        *("host_cpu_percent", "host_memory_bytes", "host_memory_total_bytes", "process_memory_bytes"),
    )
)
"""The names that the system publishes. Its others have a `/`, such as `loss/SOURCE`, or begin with `packing_`."""
RATES = ("_seconds", "_samples_per_s", "_tokens_per_s", "_tflops_per_s_per_device")
"""How fast an evaluation was."""
FIRST = ("eval_loss", "eval_accuracy", "eval_perplexity")
DEFAULT_UNIT = "eval_"


def own(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of a training that are the user's: parts of a loss, and what hooks have added."""
    return {
        name: value
        for name, value in metrics.items()
        if name not in SYSTEM and "/" not in name and not name.startswith(("packing_", "mean_"))
    }


def of_evaluation(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of all units, by the names to show: those of the default unit, without `eval_`, come first."""
    measured = {name: value for name, value in metrics.items() if not name.endswith(RATES)}
    names = [*(name for name in FIRST if name in measured), *(name for name in measured if name not in FIRST)]
    names.sort(key=lambda name: not name.startswith(DEFAULT_UNIT))
    return {name.removeprefix(DEFAULT_UNIT): measured[name] for name in names}


def shown(metrics: Mapping[str, float]) -> list[str]:
    """Returns `name value` for each."""
    return [f"{name} {number(value)}" for name, value in metrics.items()]


def number(value: float) -> str:
    """0.1234 · 1.235e+04."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"

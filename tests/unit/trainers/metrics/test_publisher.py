"""Metrics: their numbers are right, and what is off is not there. `test_documented_metrics.py` has each of the tables."""

from __future__ import annotations

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gangway.errors import UsageError
from tests.programs.tiny import TableTask
from tests.unit.training import FIXED, of, trainer
from trainers.metrics.accumulator import Kind, Layout, count, scalars
from trainers.metrics.peak_flops import FP8_PEAKS, fp8_peak_flops_per_s, peak_flops_per_s
from trainers.metrics.publisher import with_perplexity
from trainers.protocol import Loss


def published(events, **with_name):
    """The metrics of each publish of training, by step."""
    return {e["step"]: e["metrics"] for e in of(events, "metrics") if "loss" in e["metrics"]}


def test_rates_are_of_real_tokens_and_samples(tmp_path, events):
    """12 sequences on 8 devices: 4 of the 16 rows are padding."""
    trainer(tmp_path, global_batch_size=12, max_num_steps=4, publish_every_steps=2, optimizer=FIXED).train()
    for step, metrics in published(events).items():
        assert (metrics["samples"], metrics["tokens"]) == (24, 24 * 8)
        assert (metrics["total_samples"], metrics["total_tokens"]) == (12 * step, 12 * step * 8)
        assert metrics["tokens_per_s"] == pytest.approx(8 * metrics["samples_per_s"])
        assert metrics["tokens_per_s"] == pytest.approx(8 * metrics["tokens_per_s_per_device"])
        assert metrics["samples_per_s"] * 2 * metrics["step_time_s"] == pytest.approx(24)
        assert metrics["epoch"] == pytest.approx(12 * step / 96)


def test_totals_and_the_mean_loss_go_on_over_restarts(tmp_path, events):
    trainer(tmp_path / "whole", optimizer=FIXED).train()
    whole = published(events)
    events.clear()
    trainer(tmp_path / "cut", max_num_steps=5, optimizer=FIXED).train()
    events.clear()
    trainer(tmp_path / "cut", optimizer=FIXED).train()
    for step, metrics in published(events).items():
        for name in ("total_tokens", "total_samples", "mean_loss", "loss", "epoch"):
            assert metrics[name] == whole[step][name]
    assert min(published(events)) == 6
    assert whole[2]["mean_loss"] == pytest.approx((whole[1]["loss"] + whole[2]["loss"]) / 2)  # of the first, the plain mean


def test_norms_of_parameters_are_parts_of_the_norm_of_all(tmp_path, events):
    trainer(tmp_path, max_num_steps=2, metrics={"per_parameter_grad_norm": True}).train()
    metrics = published(events)[2]
    parts = {name: value for name, value in metrics.items() if name.startswith("grad_norm/")}
    assert set(parts) == {"grad_norm/embed", "grad_norm/out"}
    assert math.hypot(*parts.values()) == pytest.approx(metrics["grad_norm"], rel=1e-5)
    events.clear()
    trainer(tmp_path / "off", max_num_steps=2).train()
    assert [name for name in published(events)[2] if name.startswith("grad_norm/")] == []


class Classes(TableTask):
    """Each example has one class: no tokens."""

    tokens_per_example = 1


def test_only_a_loss_of_tokens_has_a_perplexity(tmp_path, events):
    settings = {"max_num_steps": 2, "evaluation": {"max_batches": 1}}
    trainer(tmp_path / "tokens", **settings).train()
    assert all("perplexity" in event["metrics"] for event in of(events, "metrics") if "loss" in event["metrics"])
    events.clear()
    made = trainer(tmp_path / "classes", task=f"{__name__}:Classes", **settings)
    made.train()
    assert {"loss", "eval_loss"} <= {name for event in of(events, "metrics") for name in event["metrics"]}
    assert [name for event in of(events, "metrics") for name in event["metrics"] if "perplexity" in name] == []
    assert "perplexity" not in made.evaluate(made.output.state)


def test_the_z_loss_is_a_part_of_the_loss_and_not_of_the_perplexity(tmp_path, events):
    from trainers.config import LossConfig
    from trainers.tasks.causal_lm import CausalLMTask

    tokens = {"tokens": jnp.arange(12, dtype=jnp.int32).reshape(2, 6), "weight": jnp.array([1.0, 0.0])}
    logits = jax.random.normal(jax.random.key(0), (2, 5, 32))
    task = CausalLMTask(SimpleNamespace(loss=LossConfig()))
    plain = task.loss(lambda tokens: logits, tokens)
    task.arguments.loss = LossConfig(z_loss_weight=0.1)
    with_z = task.loss(lambda tokens: logits, tokens)
    expected = 0.1 * float(np.sum(np.log(np.exp(logits[0]).sum(-1)) ** 2))  # the other row weighs nothing
    assert "z_loss" not in plain.parts
    assert [float(part) for part in with_z.parts["z_loss"]] == pytest.approx([expected, 5])
    assert float(with_z.loss_sum) == pytest.approx(float(plain.loss_sum) + expected, rel=1e-5)


def test_the_losses_of_a_router_are_no_part_of_the_perplexity():
    layout = Layout(("loss", "load_balancing_loss", "router_z_loss"), (Kind.MEAN,) * 3)
    metrics = {"loss": 2.0, "z_loss": 0.25, "load_balancing_loss": 0.5, "router_z_loss": 0.125}
    assert with_perplexity(metrics, layout)["perplexity"] == pytest.approx(np.exp(1.125))


def test_a_part_may_not_take_the_name_of_what_the_step_measures():
    with pytest.raises(UsageError, match="parts named tokens, which the step measures"):
        Layout.of(Loss(jnp.zeros(()), jnp.ones(()), {"tokens": (0.0, 1.0)}), tokens=Kind.SUM)


@pytest.mark.parametrize("total", [0, 1, (1 << 24) - 1, 1 << 24, (1 << 32) + 12345, (1 << 48) - 1])
def test_a_count_is_exact_where_float32_is_not(total):
    layout = Layout(("total_tokens",), (Kind.COUNT,))
    new = layout.pairs({"total_tokens": count(jnp.array([total >> 32, total & 0xFFFFFFFF], jnp.uint32))})
    metric_sums = layout.combine(layout.combine(jnp.asarray(layout.zeros()), jnp.array([[3.0, 4.0]])), new)
    kept = layout.combine(metric_sums, jnp.asarray(layout.zeros()))  # a batch that was skipped says nothing
    assert layout.read(np.asarray(kept)) == {"total_tokens": total}
    assert float(scalars(layout, new)["total_tokens"]) == total


def test_mfu_is_absent_where_the_peak_is_not_known(tmp_path, events):
    trainer(tmp_path, max_num_steps=1).train()
    assert "mfu" not in published(events)[1]
    assert "device_memory_bytes" not in published(events)[1]


@pytest.mark.parametrize(
    ("kind", "dtype", "peak"),
    [
        ("TPU v4", "bfloat16", 275e12),
        ("TPU v5 lite", "float32", 197e12),
        ("TPU v5", "bfloat16", 459e12),
        ("TPU v5p", "bfloat16", 459e12),
        ("TPU v6 lite", "bfloat16", 918e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H200", "float32", 494.7e12),
        ("NVIDIA A100-SXM4-40GB", "float32", 156e12),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("Tesla V100-SXM2-16GB", "float16", 125e12),
        ("NVIDIA L40", "bfloat16", None),
        ("cpu", "float32", None),
    ],
)
def test_peaks_by_the_name_of_the_device(kind, dtype, peak):
    assert peak_flops_per_s(kind, dtype) == peak


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU7x", 2307e12),
        ("TPU v5", 459e12),
        ("TPU v5 lite", None),
        ("TPU v4", None),
        ("NVIDIA H100 80GB HBM3", 1978.9e12),
        ("NVIDIA H100 PCIe", 1513e12),
        ("NVIDIA GB200", 5000e12),
        ("NVIDIA A100-SXM4-40GB", None),
        ("AMD Instinct MI300X", None),
        ("cpu", None),
    ],
)
def test_peaks_of_8_bits_by_the_name_of_the_device(kind, peak):
    assert fp8_peak_flops_per_s(kind) == peak


def test_a_peak_of_8_bits_is_that_of_a_known_device():
    for kind, peak in FP8_PEAKS:
        other = peak_flops_per_s(kind, "bfloat16")
        assert other is not None
        assert peak is None or 1 <= peak / other < 2.1

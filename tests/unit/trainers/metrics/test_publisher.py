"""Metrics: their names are documented, their numbers are right, and what is off is not there."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import ROOT
from tests.unit.training import FIXED, of, trainer
from trainers.errors import UsageError
from trainers.metrics.accumulator import Kind, Layout, count, scalars
from trainers.metrics.peak_flops import peak_flops_per_s
from trainers.metrics.publisher import Publisher, Throughput, device_memory
from trainers.protocol import Loss

DOCUMENT = (ROOT / "docs" / "metrics.md").read_text()
DOCUMENTED = set(re.findall(r"^\| `([^`]+)` \|", DOCUMENT, re.M))
NOT_HERE = {"device_memory_bytes", "device_memory_peak_bytes", "loss_scale"}
"""The CPU's backend counts no memory; a scale there is in float16 only."""
TINY_MODEL = {"vocab_size": 256, "width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 32}


def published(events, **with_name):
    """The metrics of each publish of training, by step."""
    return {e["step"]: e["metrics"] for e in of(events, "metrics") if "loss" in e["metrics"]}


def general(name):
    """As the document has it."""
    return re.sub(r"^grad_norm/.*", "grad_norm/NAME", name.removeprefix("eval_"))


def test_every_name_that_a_run_publishes_is_documented(tmp_path, events):
    everything = {
        "task": "trainers.tasks.causal_lm:CausalLMTask",
        "model": TINY_MODEL,
        "loss": {"z_loss_weight": 1e-4},
        "metrics": {"per_parameter_grad_norm": True, "peak_flops_per_s": 1e12},
        "max_num_steps": 1,
        "previews": {"prompts": []},
    }
    trainer(tmp_path, **everything).train()
    names = {name for event in of(events, "metrics") for name in event["metrics"]}
    assert {general(name) for name in names} - DOCUMENTED == set()
    assert DOCUMENTED - {general(name) for name in names} == NOT_HERE


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


def test_the_z_loss_is_a_part_of_the_loss_and_not_of_the_perplexity(tmp_path, events):
    from trainers.tasks.causal_lm import CausalLMTask

    tokens = {"tokens": jnp.arange(12, dtype=jnp.int32).reshape(2, 6), "weight": jnp.array([1.0, 0.0])}
    logits = jax.random.normal(jax.random.key(0), (2, 5, 32))
    task = CausalLMTask(SimpleNamespace(loss=SimpleNamespace(z_loss_weight=0.0)))
    plain = task.loss(lambda tokens: logits, tokens)
    task.arguments.loss.z_loss_weight = 0.1
    with_z = task.loss(lambda tokens: logits, tokens)
    expected = 0.1 * float(np.sum(np.log(np.exp(logits[0]).sum(-1)) ** 2))  # the other row weighs nothing
    assert "z_loss" not in plain.parts
    assert [float(part) for part in with_z.parts["z_loss"]] == pytest.approx([expected, 5])
    assert float(with_z.loss_sum) == pytest.approx(float(plain.loss_sum) + expected, rel=1e-5)


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


def publisher(now, told, **about):
    layout = Layout(("loss", "tokens", "samples"), (Kind.MEAN, Kind.SUM, Kind.SUM))
    return Publisher(10, Throughput(6.0, 4, **about), layout, lambda *published: told.append(published), lambda: now[0])


def test_rates_by_an_injected_clock():
    now, told = [0.0], []
    made = publisher(now, told, peak_flops_per_s=1e3)
    made.start(0)
    now[0] = 12.0
    made.flush(
        10, jnp.array([[20.0, 10.0], [800.0, 1.0], [80.0, 1.0]]), {"evaluation": 1.0, "preview": 0.5, "checkpoint": 0.5}, {}
    )
    ((step, metrics, _, distributions),) = told
    assert (step, distributions) == (10, None)
    expected = {
        "loss": 2.0,
        "perplexity": math.exp(2.0),
        "step_time_s": 1.0,
        "tokens_per_s": 80.0,
        "tokens_per_s_per_device": 20.0,
        "samples_per_s": 8.0,
        "flops_per_token": 6.0,
        "tflops_per_s_per_device": 120.0 / 1e12,
        "mfu": 0.12,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


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


def test_memory_is_that_of_the_fullest_device_where_it_is_counted():
    counting = [SimpleNamespace(memory_stats=lambda n=n: {"bytes_in_use": n, "peak_bytes_in_use": 10 - n}) for n in (3, 7)]
    assert device_memory(counting) == {"device_memory_bytes": 7, "device_memory_peak_bytes": 7}
    assert device_memory([SimpleNamespace(memory_stats=lambda: None)]) == {}

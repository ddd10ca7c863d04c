"""The tables of docs/metrics.md: each number is computed a second time, from the text alone, and compared with a run's."""

from __future__ import annotations

import functools
import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import ROOT
from tests.programs.tiny import Numbers
from tests.unit.training import of, trainer
from trainers import runtime
from trainers.metrics.accumulator import Kind, Layout
from trainers.metrics.publisher import Publisher, Throughput, device_memory

OF_TRAINING, _, _ = (ROOT / "docs" / "metrics.md").read_text().partition("## The end of a launch")
ROWS = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| (.+) \|$", OF_TRAINING, re.M)

TINY_MODEL = {"vocab_size": 256, "width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 32}
STEPS, EVERY, BATCH, LENGTH, NUM_EXAMPLES, NUM_HELD_OUT = 4, 2, 24, 8, 96, 21
SKIPPED = 2
"""The index of the batch whose update is not applied."""
INTERVALS = {2: [0, 1], 4: [3]}
"""The batches that count, by the step of the publish."""
Z_LOSS_WEIGHT, LEARNING_RATE, PEAK = 0.01, 1e-30, 1e12
"""The rate is so small that the parameters stay as they are: what each step measures can be computed afterwards."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with everything on, 2 micro-batches of 12 rows on 8 devices, and a batch that is skipped."""
    events, before = [], runtime.current()
    runtime.install(runtime.Runtime(events.append, skip_batches=(SKIPPED,)))
    made = trainer(
        tmp_path_factory.mktemp("run"),
        task="trainers.tasks.causal_lm:CausalLMTask",
        model=TINY_MODEL,
        loss={"z_loss_weight": Z_LOSS_WEIGHT},
        metrics={"per_parameter_grad_norm": True, "peak_flops_per_s": PEAK},
        optimizer={"name": "adamw", "learning_rate": LEARNING_RATE, "max_grad_norm": 1e-3},
        global_batch_size=BATCH,
        accumulation_steps=2,
        max_num_steps=STEPS,
        publish_every_steps=EVERY,
        previews={"prompts": []},
    )
    made.train()
    runtime.install(before)
    published = {event["step"]: event["metrics"] for event in of(events, "metrics") if "loss" in event["metrics"]}
    evaluated = next(event["metrics"] for event in of(events, "metrics") if "eval_loss" in event["metrics"])
    batches = [[k * BATCH + row for row in range(BATCH)] for k in range(STEPS)]
    params = jax.device_get(made.output.state.params)
    gradients_of = jax.jit(jax.value_and_grad(functools.partial(losses, made.model.merge), has_aux=True))
    return SimpleNamespace(
        trainer=made,
        published=published,
        evaluated=evaluated,
        batches=[Measured(gradients_of, params, Numbers(NUM_EXAMPLES, LENGTH), examples) for examples in batches],
        held_out=Measured(gradients_of, params, Numbers(NUM_HELD_OUT, LENGTH), range(NUM_HELD_OUT)),
    )


class Measured:
    """What some examples give: means over their targets."""

    def __init__(self, gradients_of, params, dataset, examples):
        tokens = np.stack([dataset[index]["tokens"] for index in examples])
        (loss, (z_loss, hits)), gradients = gradients_of(params, tokens)
        self.loss, self.z_loss, self.accuracy = float(loss), float(z_loss), float(hits)
        self.num_samples, self.num_tokens = len(tokens), tokens[:, 1:].size
        self.grad_norm = float(optax.tree.norm(gradients))
        named = jax.tree_util.tree_leaves_with_path(gradients)
        self.grad_norms = {jax.tree_util.keystr(path, simple=True, separator="/"): float(jnp.linalg.norm(g)) for path, g in named}


def losses(merge, params, tokens):
    """(the loss, (the z-loss in it, the accuracy))"""
    targets = tokens[:, 1:]
    logits = merge(params)(tokens[:, :-1])
    z_loss = jnp.mean(Z_LOSS_WEIGHT * jax.nn.logsumexp(logits, axis=-1) ** 2)
    likelihoods = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return z_loss - jnp.mean(likelihoods), (z_loss, jnp.mean(jnp.argmax(logits, axis=-1) == targets))


def mean(run, step, name):
    """Over the batches of an interval: they have equal numbers of targets."""
    return np.mean([getattr(run.batches[k], name) for k in INTERVALS[step]])


def since_the_beginning(run, step, name):
    return [getattr(run.batches[k], name) for end, batches in INTERVALS.items() if end <= step for k in batches]


def learning_rate(run, step):
    """The cosine from the rate to a tenth of it, after the updates before the newest one."""
    updates_before = len(since_the_beginning(run, step, "loss")) - 1
    return LEARNING_RATE * (0.1 + 0.9 * (1 + math.cos(math.pi * updates_before / STEPS)) / 2)


def flops_per_token(run, step):
    """6 N + 6 L T D: the table of the tokens is also that of the logits."""
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(run.trainer.output.state.params))
    return 6 * num_parameters + 6 * TINY_MODEL["num_layers"] * LENGTH * TINY_MODEL["width"]


BY_A_RUN = {
    "loss": ("nats per target", lambda run, step: mean(run, step, "loss")),
    "mean_loss": ("nats per target", lambda run, step: np.mean(since_the_beginning(run, step, "loss"))),
    "perplexity": ("1", lambda run, step: math.exp(mean(run, step, "loss") - mean(run, step, "z_loss"))),
    "accuracy": ("1", lambda run, step: mean(run, step, "accuracy")),
    "z_loss": ("nats per target", lambda run, step: mean(run, step, "z_loss")),
    "grad_norm": ("1", lambda run, step: mean(run, step, "grad_norm")),
    "learning_rate": ("1", learning_rate),
    "skipped_batches": ("batches", lambda run, step: step - max(0, step - EVERY) - len(INTERVALS[step])),
    "epoch": ("epochs", lambda run, step: step * BATCH / NUM_EXAMPLES),
    "tokens": ("tokens", lambda run, step: sum(run.batches[k].num_tokens for k in INTERVALS[step])),
    "samples": ("examples", lambda run, step: sum(run.batches[k].num_samples for k in INTERVALS[step])),
    "total_tokens": ("tokens", lambda run, step: sum(since_the_beginning(run, step, "num_tokens"))),
    "total_samples": ("examples", lambda run, step: sum(since_the_beginning(run, step, "num_samples"))),
    "flops_per_token": ("FLOP", flops_per_token),
}
"""name: (unit, what a run should publish at a step)"""

BY_A_CLOCK = {
    "step_time_s": ("s", 1.0),
    "tokens_per_s": ("tokens/s", 80.0),
    "tokens_per_s_per_device": ("tokens/s", 20.0),
    "samples_per_s": ("examples/s", 8.0),
    "tflops_per_s_per_device": ("TFLOP/s", 180e-12),
    "mfu": ("1", 0.18),
    "mfu_of_fp8_peak": ("1", 0.045),
}
"""name: (unit, what is published of 10 steps of 80 tokens and 8 samples in 12 s, 2 s of which were no steps, on 4 devices with a
peak of 1000 FLOP/s, and of 4000 FLOP/s for 8 bits, at 6 FLOP a token and 15 tokens in each sample, 10 of them targets)"""

OTHERS = {
    "eval_seconds": "s",
    "eval_samples_per_s": "examples/s",
    "eval_tokens_per_s": "tokens/s",
    "eval_tflops_per_s_per_device": "TFLOP/s",
    "busiest_expert": "1",
    "router_entropy": "1",
    "grad_norm/NAME": "1",
    "mean_NAME": "as NAME",
    "learning_rate/PATTERN": "1",
    "loss_scale": "1",
    "lost_updates": "1",
    "device_memory_bytes": "bytes",
    "device_memory_peak_bytes": "bytes",
    "host_cpu_percent": "%",
    "host_memory_bytes": "bytes",
    "host_memory_total_bytes": "bytes",
    "process_memory_bytes": "bytes",
    "host_disk_read_bytes_per_s": "bytes/s",
    "host_disk_written_bytes_per_s": "bytes/s",
    "host_network_received_bytes_per_s": "bytes/s",
    "host_network_sent_bytes_per_s": "bytes/s",
}
"""Units of what has a test of its own below."""


def test_the_tables_have_each_metric_once_with_its_unit():
    units = {name: unit for name, (unit, _) in (BY_A_RUN | BY_A_CLOCK).items()} | OTHERS
    assert {name: unit for name, unit, _ in ROWS} == units
    assert len(ROWS) == len(units)


@pytest.mark.parametrize("step", INTERVALS)
@pytest.mark.parametrize("name", BY_A_RUN)
def test_a_run_publishes_what_the_text_says(run, name, step):
    _, expected = BY_A_RUN[name]
    assert run.published[step][name] == pytest.approx(expected(run, step), rel=1e-5, abs=0)


def test_a_run_publishes_all_of_it_and_nothing_else(run):
    published = {re.sub(r"^grad_norm/.*", "grad_norm/NAME", name) for metrics in run.published.values() for name in metrics}
    elsewhere = {
        *(name for name, _, _ in ROWS if name.startswith("eval_")),
        "mean_NAME",
        "learning_rate/PATTERN",
        "loss_scale",
        "lost_updates",
        "device_memory_bytes",
        "device_memory_peak_bytes",
        *("busiest_expert", "router_entropy", "mfu_of_fp8_peak"),
    }  # of float16, of bfloat16, of mixtures of experts, of fp8, and not of CPUs
    assert published == {name for name, _, _ in ROWS} - elsewhere


@pytest.mark.parametrize("step", INTERVALS)
def test_the_norm_of_each_parameter(run, step):
    published = {name.partition("/")[2]: value for name, value in run.published[step].items() if name.startswith("grad_norm/")}
    expected = [run.batches[k].grad_norms for k in INTERVALS[step]]
    assert published == pytest.approx({name: np.mean([norms[name] for norms in expected]) for name in expected[0]}, rel=1e-4)
    ((example, text),) = [(name, text) for name, _, text in ROWS if name.startswith("grad_norm/")]
    assert example == "grad_norm/NAME"
    assert all(named in run.published[step] for named in re.findall(r"`(grad_norm/[^`]+)`", text))


def test_an_evaluation_is_of_each_held_out_example_once(run):
    held_out = run.held_out
    expected = {
        "eval_loss": held_out.loss,
        "eval_z_loss": held_out.z_loss,
        "eval_accuracy": held_out.accuracy,
        "eval_perplexity": math.exp(held_out.loss - held_out.z_loss),
    }
    rates = {name for name, _, _ in ROWS if name.startswith("eval_")}
    assert {name: value for name, value in run.evaluated.items() if name not in rates} == pytest.approx(expected, rel=1e-5)


def test_the_rates_of_an_evaluation_are_over_its_seconds(run):
    evaluated, seconds = run.evaluated, run.evaluated["eval_seconds"]
    assert evaluated["eval_samples_per_s"] * seconds == pytest.approx(NUM_HELD_OUT)
    assert evaluated["eval_tokens_per_s"] * seconds == pytest.approx(NUM_HELD_OUT * LENGTH)
    forward = flops_per_token(run, STEPS) / 3
    tflops = forward * LENGTH * evaluated["eval_samples_per_s"] / jax.device_count() / 1e12
    assert evaluated["eval_tflops_per_s_per_device"] == pytest.approx(tflops, rel=1e-6, abs=0)
    assert not {"eval_seconds", "eval_tokens_per_s"} & run.trainer.output.metrics.keys()  # nothing depends on a clock
    batches = list(run.trainer.eval(run.trainer.output.state))
    assert [round(batch["samples_per_s"] * batch["seconds"]) for batch in batches] == [12, 9]


def test_rates_are_over_the_wall_time_without_what_is_no_step(run):
    now, told = [0.0], []
    layout = Layout(("loss", "tokens", "samples"), (Kind.MEAN, Kind.SUM, Kind.SUM))
    throughput = Throughput(
        flops_per_token=6.0, tokens_per_example=15, num_devices=4, peak_flops_per_s=1e3, fp8_peak_flops_per_s=4e3
    )
    made = Publisher(throughput, layout, lambda *published: told.append(published), lambda: now[0])
    made.start(0)
    now[0] = 12.0
    sums = jnp.array([[20.0, 10.0], [800.0, 1.0], [80.0, 1.0]])
    made.flush(10, sums, {"evaluation": 1.0, "preview": 0.5, "checkpoint": 0.5}, {})
    ((step, published, _, distributions),) = told
    assert (step, distributions) == (10, None)
    assert {name: published[name] for name in BY_A_CLOCK} == pytest.approx(
        {n: value for n, (_, value) in BY_A_CLOCK.items()}, rel=1e-6, abs=0
    )
    for metrics in run.published.values():  # and a run publishes all of them, of its own numbers
        seconds = EVERY * metrics["step_time_s"]
        assert metrics["tokens_per_s"] == pytest.approx(metrics["tokens"] / seconds)
        assert metrics["samples_per_s"] == pytest.approx(metrics["samples"] / seconds)
        assert metrics["tokens_per_s_per_device"] == pytest.approx(metrics["tokens_per_s"] / jax.device_count())
        tflops = metrics["flops_per_token"] * LENGTH * metrics["samples_per_s"] / jax.device_count() / 1e12
        assert metrics["tflops_per_s_per_device"] == pytest.approx(tflops, rel=1e-6, abs=0)
        assert metrics["mfu"] == pytest.approx(tflops * 1e12 / PEAK)


def test_the_time_of_a_step_is_that_between_completions_however_early_it_began():
    now, told = [0.0], []
    layout = Layout(("loss", "tokens", "samples"), (Kind.MEAN, Kind.SUM, Kind.SUM))
    made = Publisher(Throughput(6.0, 10, 1), layout, lambda *published: told.append(published), lambda: now[0])
    made.start(0)

    def began(step):
        made.cut(step, jnp.array([[1.0, 1.0], [80.0, 1.0], [8.0, 1.0]]), {}, {})

    def complete(step, at_s):
        now[0] = at_s
        made.completed(step)

    began(1)
    began(2)  # at once: the device works on the first
    complete(1, 10.0)
    made.collect(1)
    now[0] = 11.0
    began(3)
    complete(2, 20.0)
    complete(3, 28.0)  # before the second is collected, as at an evaluation
    now[0] = 30.0
    made.collect(3)
    complete(4, 36.0)
    began(4)  # complete before it is cut, as the first step of a process
    now[0] = 39.0
    made.collect(4)
    assert [metrics["step_time_s"] for _, metrics, *_ in told] == [10.0, 10.0, 8.0, 8.0]


@pytest.mark.slow("trains")
def test_the_scale_is_what_the_loss_is_multiplied_by_and_of_float16_only(tmp_path, events, run):
    half = "tests.unit.trainers.step.test_loss_scale:Half"
    trainer(tmp_path, task=half, dtype="float16", loss_scale={"initial": 64.0}, max_num_steps=1).train()
    assert of(events, "metrics")[0]["metrics"]["loss_scale"] == 64.0
    assert "loss_scale" not in run.published[EVERY]


def test_memory_is_the_largest_value_of_the_devices_of_the_host():
    assert device_memory([SimpleNamespace(memory_stats=lambda: None)]) == {}
    stats = [{"bytes_in_use": 3, "peak_bytes_in_use": 9}, {"bytes_in_use": 7, "peak_bytes_in_use": 8}]
    devices = [SimpleNamespace(memory_stats=lambda own=own: own) for own in stats]
    assert device_memory(devices) == {"device_memory_bytes": 7, "device_memory_peak_bytes": 9}

"""The first non-finite value of a batch: in which module, by which operation, on which line."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gangway.errors import NonFiniteLossError
from orchestrator.run_state.incidents import of_anomaly
from tests.programs.tiny import TableTask
from tests.unit.training import of, trainer
from trainers.config import MeshConfig
from trainers.config.model import UNROLLED_LAYERS
from trainers.diagnostics.nonfinite import find
from trainers.models import attention, decoder
from trainers.parallel import mesh as meshes
from trainers.trainer.build import build

TINY = {"width": 32, "num_heads": 4, "num_kv_heads": 2, "mlp_width": 48}


def found(made, params=None, batch=None):
    build(made)
    state = jax.jit(made.design.initial_state, out_shardings=made.state_shardings)()
    params = state.params if params is None else params(state.params)
    batch = made.dataloaders.dataloader_train.batch(0) if batch is None else batch

    def objective(params, batch, number, step):
        return made.design.loss(params, batch, step).loss_sum

    return find(objective, made.mesh, params, batch, state.step)


def language_model(tmp_path, mesh=None, **model):
    task = "trainers.tasks.causal_lm:CausalLMTask"
    return trainer(tmp_path, task=task, model={**TINY, **model}, mesh=mesh or {"data": 8}, accumulation_steps=2)


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


MESHES = [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}]


@pytest.mark.parametrize(
    ("mesh", "num_layers", "planted", "module", "operation", "function", "text"),
    [
        (MESHES[0], UNROLLED_LAYERS + 1, "gate", "layers/2/mlp", "mul", decoder.mlp, "inner ="),
        (
            MESHES[1],
            3,
            "query",
            "layers/2/attention",
            "dot_general",
            attention.dot_product,
            "return jax.nn.dot_product_attention",
        ),
    ],
)
@pytest.mark.slow("compiles a step, and reads its parts")
def test_an_overflow_in_one_layer_is_named_with_layer_and_line(
    tmp_path, mesh, num_layers, planted, module, operation, function, text
):
    made = language_model(tmp_path, mesh=mesh, num_layers=num_layers)

    def overflow(params):
        """In layer 2: large, but finite, weights."""
        names = {"gate": ("gate", "up"), "query": ("query", "key")}[planted]
        for name in names:
            params["layers"][name] = params["layers"][name].at[2].mul(1e20)
        return params

    where = found(made, overflow)
    assert f"is made by {module}" in where
    assert f", operation {operation} (" in where
    assert f"{function.__module__.replace('.', '/')}.py:{line_of(function, text)} in" in where
    assert "micro-batch 0" in where


@pytest.mark.slow("compiles a step, and reads its parts")
def test_a_parameter_or_an_input_that_is_not_finite_is_named_first(tmp_path):
    made = language_model(tmp_path, num_layers=1)

    def poisoned(params):
        params["layers"]["up"] = params["layers"]["up"].at[0, 3, 3].set(jnp.nan)
        return params

    assert found(made, poisoned) == "parameter ['layers']['up'] is not finite itself"
    batch = made.dataloaders.dataloader_train.batch(0)
    assert found(made, batch={**batch, "weight": batch["weight"] * jnp.inf}) == "input ['weight'] is not finite itself"


@pytest.mark.slow("compiles a step and trains")
def test_in_an_ordinary_batch_nothing_is_found(tmp_path):
    assert found(language_model(tmp_path, num_layers=1)).startswith("computed once more, every value of the loss")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: jnp.sum(jnp.sqrt(x)), "the gradient of root, operation"),  # of zero: infinitely steep
        # The forward pass is finite: only the gradient of the branch that was not taken is not.
        (lambda x: jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0)), "the gradient of root, operation"),
        (lambda x: jnp.sum(jnp.where(x > 1, x, -jnp.inf) * 0.0), "root, operation mul"),  # NaN of an infinity that was meant
        (lambda x: jax.lax.scan(lambda c, _: (c * 1e30, None), 1.0 + x[0], None, length=3)[0], "root/1, operation mul"),
        (
            lambda x: jnp.sum(jax.lax.scan(lambda c, _: (c + 1.0, jnp.exp(c + 1e4)), x[0], None, length=3)[1]),
            "root/0, operation exp",
        ),
        (lambda x: jnp.sum(jnp.take(x, jnp.arange(5))), "root, operation gather"),  # past the end of a table
    ],
)
def test_any_program_will_do(function, expected):
    mesh = meshes.make_mesh(MeshConfig(data=8))

    @jax.checkpoint
    @jax.jit
    def objective(x, batch, number, step):
        with jax.named_scope("root"):
            return function(x * batch["x"][0])

    put = lambda value: meshes.put_everywhere(mesh, value)  # noqa: E731
    origin = find(objective, mesh, put(np.zeros(2, np.float32)), {"x": put(np.ones((1, 1), np.float32))}, put(np.int32(0)))
    assert f"is made by {expected}" in origin


class Steep(TableTask):
    """The loss of batch 3 (sample 48 is in it) is infinite."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        with jax.named_scope("penalty"):
            planted = jnp.any(batch["sample_id"] == 48)
            penalty = jnp.sum(jnp.exp(jnp.where(planted, 1e4, 0.0) * jnp.abs(model.out[...][0, 0])))
        return loss._replace(loss_sum=loss.loss_sum + penalty)


STEEP = {"task": "tests.unit.trainers.diagnostics.test_nonfinite:Steep", "max_num_steps": 8}


@pytest.mark.slow("compiles a step, and reads its parts")
def test_a_run_that_fails_of_it_says_where(tmp_path, events):
    with pytest.raises(NonFiniteLossError) as raised:
        trainer(tmp_path, **STEEP, anomalies={"non_finite": "raise"}).train()
    line = line_of(Steep.loss, "penalty = jnp.sum")
    message = str(raised.value)
    assert "batch 3 has a non-finite loss or gradient" in message
    assert "is made by penalty, operation exp" in message
    assert f"tests/unit/trainers/diagnostics/test_nonfinite.py:{line} in Steep.loss" in message
    assert "with the parameters of step" in message


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.slow("compiles a step, and reads its parts")
def test_a_run_that_goes_on_says_it_once(tmp_path, events, policy):
    made = trainer(tmp_path, **{**STEEP, "max_num_steps": 20}, anomalies={"non_finite": policy})
    state = made.train()
    assert int(state.batch_index) == 20
    notes = [event["message"] for event in of(events, "note") if "penalty, operation exp" in event["message"]]
    assert len(notes) == 1
    assert notes[0].startswith("batch 3: ")
    (first, *others) = of(events, "anomaly")
    assert first["batch_index"] == 3
    assert notes[0] == f"batch 3: {first['origin']}"
    assert not any("origin" in event for event in others)
    summary = of_anomaly({**first, "t": 0.0}, 0).evidence["summary"]
    assert summary.startswith("a loss or gradient that is not finite in batch 3")
    assert summary.endswith(f": {first['origin']}")

"""What a model says of its parameters: which dimensions are stacked, and what is a matrix. Its attributes may have any names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from gangway.errors import UsageError
from tests.programs.tiny import TableTask
from tests.unit.training import trainer
from trainers.config import ModelConfig
from trainers.models.adapters import from_functions, from_linen
from trainers.models.created import noting_shapes
from trainers.models.decoder import Decoder
from trainers.step.state import kinds_of, logical_axes

WIDTH = 4
HERE = "tests.unit.trainers.step.test_parameter_kinds:"


def noted(build):
    with noting_shapes():
        return nnx.eval_shape(lambda: build(nnx.Rngs(0)))


def kinds(build):
    """The dimensions of one parameter and its role, by name."""
    return as_pairs(noted(build))


def as_pairs(model):
    return {name: (kind.dimensions, kind.role) for name, kind in kinds_of(model).items()}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.own = nnx.Param(jnp.ones(WIDTH))
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.axes = nnx.Param(jnp.ones((WIDTH, WIDTH)), logical_axes=("embed", "mlp"))


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.tower = nnx.vmap(Block, in_axes=0, out_axes=0)(rngs.split(3))
        self.across = nnx.vmap(Block, in_axes=0, out_axes=1)(rngs.split(3))
        self.layers = nnx.List([Block(rngs), Block(rngs)])
        self.expert_up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.embed = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.unembed = nnx.Param(jnp.ones((WIDTH, WIDTH)))


MATRIX, VECTOR = ((-2, -1), "matrix"), ((-1,), "vector")


@pytest.fixture(scope="module")
def stack():
    return noted(Stack)


def test_the_dimensions_that_vmap_has_added_are_stacked_and_names_mean_nothing(stack):
    assert as_pairs(stack) == {
        **{f"{where}.{name}": kind for where in ("tower", "layers.0", "layers.1") for name, kind in BLOCK.items()},
        **{f"across.{name}": kind if kind != VECTOR else ((-2,), "vector") for name, kind in ACROSS.items()},
        **{f"{name}.{leaf}": BLOCK[f"linear.{leaf}"] for name in ("expert_up", "embed") for leaf in ("kernel", "bias")},
        "unembed": MATRIX,
    }


BLOCK = {"norm.scale": VECTOR, "own": VECTOR, "linear.kernel": MATRIX, "linear.bias": VECTOR, "axes": MATRIX}
# [WIDTH, 3, WIDTH]
ACROSS = {name: ((-3, -1), "matrix") if kind == MATRIX else kind for name, kind in BLOCK.items()}


def test_what_the_model_says_itself_comes_first():
    def build(rngs):
        return nnx.Dict(
            by_hand=nnx.Param(jnp.ones((3, WIDTH)), stacked=1),
            by_axes=nnx.Param(jnp.ones((3, WIDTH)), logical_axes=("layers", "norm")),
            experts=nnx.Param(jnp.ones((3, 2, WIDTH, WIDTH)), logical_axes=("layers", "experts", "embed", "mlp")),
            by_sharding=nnx.Param(jnp.ones((3, WIDTH)), out_sharding=("layers", None), eager_sharding=False),
            words=nnx.Param(jnp.ones((9, WIDTH)), logical_axes=("vocab", "embed")),
            positions=nnx.Param(jnp.ones((9, WIDTH)), update_as="table"),
            heads=nnx.Param(jnp.ones((2, WIDTH)), update_as="vector"),
        )

    assert kinds(build) == {
        "by_hand": VECTOR,
        "by_axes": VECTOR,
        "experts": MATRIX,
        "by_sharding": VECTOR,
        "words": ((-2, -1), "table"),
        "positions": ((-2, -1), "table"),
        "heads": ((-2, -1), "vector"),
    }


def test_biases_and_tables_of_flax_are_known():
    def build(rngs):
        attention = nnx.MultiHeadAttention(2, WIDTH, rngs=rngs, decode=False)
        return nnx.Dict(attention=attention, words=nnx.Embed(7, WIDTH, rngs=rngs))

    found = kinds(build)
    assert found["attention.query.bias"] == ((-2, -1), "vector")
    assert found["attention.query.kernel"] == ((-3, -2, -1), "matrix")
    assert found["words.embedding"] == ((-2, -1), "table")


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        x = linen.Dense(WIDTH, name="linear")(linen.LayerNorm(name="norm")(x))
        return x * self.param("own", linen.initializers.ones, (WIDTH,)), None


class LinenStack(linen.Module):
    @linen.compact
    def __call__(self, x):
        scanned = linen.scan(LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = scanned(name="tower")(x, None)
        return linen.Dense(WIDTH, name="layers")(x)


def test_the_dimensions_that_scan_has_added_to_a_linen_module_are_stacked():
    assert kinds(lambda rngs: from_linen(LinenStack(), jnp.zeros((1, WIDTH)), rngs=rngs)) == {
        "linen.layers.bias": VECTOR,
        "linen.layers.kernel": MATRIX,
        "linen.tower.linear.bias": VECTOR,
        "linen.tower.linear.kernel": MATRIX,
        "linen.tower.norm.bias": VECTOR,
        "linen.tower.norm.scale": VECTOR,
        "linen.tower.own": VECTOR,
    }


def test_functions_name_their_stacked_parameters():
    def init(key):
        return {"layers": {"scale": jnp.ones((3, WIDTH))}, "layers_too": jnp.ones((3, WIDTH))}

    def build(rngs, stacked=("layers",)):
        return from_functions(init, lambda params, x: x, rngs=rngs, stacked=stacked)

    assert kinds(build) == {"weights.layers.scale": VECTOR, "weights.layers_too": MATRIX}
    with pytest.raises(UsageError, match=r"stacked = 'blocks': .* of no parameter \(layers.scale, layers_too\)"):
        kinds(lambda rngs: build(rngs, ("blocks",)))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"stacked": 3}, r"stacked of the variable w = 3: expected how many of its 2 dimensions \[3, 4\] are stacked"),
        ({"stacked": "layers"}, "stacked of the variable w = 'layers': expected how many"),
        ({"update_as": "norm"}, "update_as of the variable w = 'norm': expected one of matrix, vector, table"),
        ({"update_as": "table", "stacked": 1}, "update_as of the variable w = 'table': it has 1 dimensions; expected 2 or more"),
    ],
)
def test_what_says_nothing_is_an_error_that_names_the_variable(metadata, message):
    with pytest.raises(UsageError, match=message):
        kinds(lambda rngs: nnx.Dict(w=nnx.Param(jnp.ones((3, WIDTH)), **metadata)))


def test_axes_that_were_named_inside_vmap_stay_those_of_their_dimensions(stack):
    axes = logical_axes(nnx.state(stack, nnx.Param))
    assert axes["tower"]["axes"] == ("layers", "embed", "mlp")
    assert axes["across"]["axes"] == ("embed", "layers", "mlp")
    assert axes["layers"][0]["axes"] == ("embed", "mlp")
    wrong = nnx.Dict(w=nnx.Param(jnp.ones((3, WIDTH)), logical_axes=("embed",)))
    with pytest.raises(UsageError, match=r"logical_axes of the variable w = \('embed',\): expected one name, or None, for each"):
        logical_axes(nnx.state(wrong, nnx.Param))


def test_the_kinds_of_a_decoder_are_those_of_its_axes():
    sizes = {"vocab_size": 16, "width": 8, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "mlp_width": 8}
    found = kinds(lambda rngs: Decoder(ModelConfig(family="mixtral", num_experts=2, experts_per_token=1, **sizes), rngs=rngs))
    assert {name for name, kind in found.items() if kind[1] == "table"} == {"embed", "unembed"} & found.keys()
    assert {name for name, kind in found.items() if kind == VECTOR} == {
        "final_norm",
        "layers.attention_norm",
        "layers.mlp_norm",
    }
    assert all(found[f"layers.expert_{name}"] == MATRIX for name in ("gate", "up", "down"))


class TowerTask(TableTask):
    """Its gradients are 0: an update is the decay alone."""

    def build_model(self, rngs):
        return Stack(rngs)

    def loss(self, model, batch):
        return 0.0 * sum(jnp.sum(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))), batch["weight"].sum()


def test_a_training_decays_the_matrices_of_a_foreign_model_and_nothing_else(tmp_path):
    settings = {"name": "adamw", "learning_rate": 0.1, "weight_decay": 0.5, "schedule": {"name": "constant"}}
    made = trainer(tmp_path, task=HERE + "TowerTask", optimizer=settings, max_num_steps=1, checkpoint={"save_at_end": False})
    state = made.train()
    before = dict(jax.tree_util.tree_leaves_with_path(made.design.initial_state().params))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        factor = 0.95 if name.endswith(("kernel", "axes", "unembed")) else 1.0
        np.testing.assert_allclose(leaf, before[path] * factor, rtol=1e-5, err_msg=name)

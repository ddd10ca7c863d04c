"""The first rows of the data and the loss are tried before a machine is taken: `trainers.planning`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from trainers.base import BaseTrainer
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.planning import estimate, first_batch
from trainers.protocol import Loss, Max, PerExample

HERE = __name__


def arguments(**changes) -> TrainingArguments:
    base = {
        "name": "x",
        "max_num_steps": 5,
        "global_batch_size": 8,
        "task": f"{HERE}:Classifier",
        "data": {"dataset": f"{HERE}:rows"},
        "previews": {"prompts": []},
    }
    return from_dict(TrainingArguments, base | changes)


def plan(**changes):
    return estimate.plan(arguments(**changes), num_devices=1)


# ---------------------------------------------------------------------- data


def rows(arguments):
    """Three columns, as a user has them: numbers, a class, and which of them are hard."""
    random = np.random.default_rng(0)
    return [{"x": random.normal(size=4).astype(np.float32), "label": np.int32(i % 3)} for i in range(20)], None


def with_one(change):
    """Returns a function that gives the rows, of which number 5 is changed."""

    def dataset(arguments):
        examples, held_out = rows(arguments)
        examples[5] = change(examples[5])
        return examples, held_out

    return dataset


ragged = with_one(lambda row: row | {"x": np.zeros(6, np.float32)})
other_type = with_one(lambda row: row | {"label": np.float32(1)})
lacking = with_one(lambda row: {"x": row["x"]})
added = with_one(lambda row: row | {"hard": np.int32(1)})
uneven = with_one(lambda row: row | {"x": [[1.0, 2.0], [3.0]]})


def held_out_ragged(arguments):
    return rows(arguments)[0], ragged(arguments)[0][:8]


def unlabelled(arguments):
    return [{"x": row["x"]} for row in rows(arguments)[0]], None


def to_the_longest(examples):
    """A collator whose shapes depend on the examples."""
    width = max(len(example["x"]) for example in examples)
    return {
        "x": np.stack(
            [np.resize(example["x"], width)[:4] if width == 4 else np.resize(example["x"], width) for example in examples]
        ),
        "label": np.stack([example["label"] for example in examples]),
    }


# ---------------------------------------------------------------------- tasks


class Linear(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layer = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


class Classifier:
    tokens_per_example = 1

    def __init__(self, arguments):
        self.arguments = arguments

    def build_model(self, rngs):
        return Linear(rngs)

    def flops_per_token(self, num_parameters):
        return 6.0 * num_parameters

    def values(self, model, batch):
        logits = model(batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses, (jnp.argmax(logits, -1) == batch["label"]).astype(jnp.float32)

    def loss(self, model, batch):
        losses, hits = self.values(model, batch)
        return PerExample(losses, {"accuracy": hits})


class Weighted(Classifier):
    """Adds the rows up itself, by their weights."""

    def loss(self, model, batch):
        losses, hits = self.values(model, batch)
        weight = batch["weight"]
        worst = Max(jnp.max(jnp.where(weight > 0, losses, -jnp.inf)))
        return Loss(
            jnp.sum(losses * weight), jnp.sum(weight), {"accuracy": (jnp.sum(hits * weight), jnp.sum(weight)), "worst": worst}
        )


class CountsHits(Classifier):
    """The loss is right; the accuracy counts all rows."""

    def loss(self, model, batch):
        losses, hits = self.values(model, batch)
        weight = batch["weight"]
        return Loss(jnp.sum(losses * weight), jnp.sum(weight), {"accuracy": (jnp.sum(hits), hits.size)})


class MeanOfAll(Classifier):
    """As in a tutorial: a mean over whatever is in the batch."""

    def loss(self, model, batch):
        return jnp.mean(self.values(model, batch)[0]), None


class DividesByAll(Classifier):
    """Rows of weight 0 add nothing, but the mean counts them."""

    def loss(self, model, batch):
        return jnp.mean(self.values(model, batch)[0] * batch["weight"]), None


class Worst(Classifier):
    def loss(self, model, batch):
        losses, _ = self.values(model, batch)
        weight = batch["weight"]
        return {"ce": (jnp.sum(losses * weight), jnp.sum(weight)), "worst": Max(jnp.max(losses))}


class OnlyOnChips(Weighted):
    def loss(self, model, batch):
        zero = jax.pure_callback(self.fail, jax.ShapeDtypeStruct((), np.float32))
        found = super().loss(model, batch)
        return found._replace(loss_sum=found.loss_sum + jax.lax.stop_gradient(zero))

    def fail(self):
        raise RuntimeError("no such chip")


class Huge(Weighted):
    def flops_per_token(self, num_parameters):
        return 1e15


# ---------------------------------------------------------------------- the first batch


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ("ragged", ["example 5: column x is float32[6], and float32[4] in example 0: override build_data_collate_info to cut"]),
        ("other_type", ["example 5: column label is float32[], and int32[] in example 0: give it one type", "np.int32(value)"]),
        ("lacking", ["example 5 has no column label, which example 0 has (it has sample_id, x): give every example the same"]),
        ("added", ["example 5 has a column hard, which example 0 has not (it has sample_id, x, label)", "data.ignore_columns"]),
        ("uneven", ["example 5: column x is no array (", "in the dataset or in build_data_transform"]),
    ],
)
def test_examples_that_make_no_batch_are_found_before_a_machine_is_taken(dataset, expected):
    (problem,), _ = plan(data={"dataset": f"{HERE}:{dataset}", "shuffle": False})
    assert [part for part in expected if part not in problem] == []


def test_held_out_examples_too():
    (problem,), _ = plan(data={"dataset": f"{HERE}:held_out_ragged", "shuffle": False})
    assert "column x is float32[6], and float32[4] in example" in problem


def test_a_collator_whose_shapes_depend_on_the_examples():
    (problem,), _ = plan(data={"dataset": f"{HERE}:ragged", "shuffle": False, "collator": f"{HERE}:to_the_longest"})
    assert "x float32[4] for one, float32[6] for 8" in problem
    assert "pad to a fixed length in data.collator" in problem


def test_a_column_that_the_loss_misses_is_named_with_the_line_and_with_the_columns_there_are():
    (problem,), _ = plan(data={"dataset": f"{HERE}:unlabelled"})
    assert problem.startswith(f"model: KeyError: 'label' ({__file__}, line ")
    assert 'batch["label"])' in problem
    assert "while the loss of Classifier was traced with a batch of sample_id int32[8], weight float32[8], x float32" in problem
    assert "it has no column 'label'; give the examples of data.dataset one" in problem


def test_one_type_for_all_batches_of_a_run_not_only_for_those_of_one(tmp_path, events):
    """The rows of one batch agree; those of the next are of another type."""
    examples, _ = rows(None)
    late = [row | {"label": np.float32(0)} if i >= 8 else row for i, row in enumerate(examples[:16])]
    made = arguments(storage=str(tmp_path), data={"dataset": f"{HERE}:rows", "shuffle": False})
    with pytest.raises(Exception, match=r"from index \d+ on have other columns or types .*: label float32, before int32"):
        BaseTrainer(made, late).train()


# ---------------------------------------------------------------------- rows that only fill up a batch


@pytest.mark.parametrize(
    ("task", "metric"),
    [("CountsHits", "accuracy"), ("MeanOfAll", "loss"), ("DividesByAll", "loss"), ("Worst", "worst")],
)
def test_a_loss_that_counts_rows_of_weight_0_is_an_error(task, metric):
    (problem,), facts = plan(task=f"{HERE}:{task}")
    assert problem.startswith(f"the loss of {task} counts rows that only fill up a batch")
    assert f" changes {metric} from " in problem
    before, _, after = problem.partition(f"{metric} from ")[2].partition(";")[0].partition(" to ")
    assert float(before) != float(after)
    assert "multiply each row by batch['weight']" in problem
    assert "padding" not in facts


def test_a_loss_that_weights_its_rows_passes_and_one_of_examples_needs_no_trial():
    assert plan(task=f"{HERE}:Weighted")[1]["padding"] == first_batch.CHECKED
    problems, facts = plan()
    assert (problems, facts.get("padding")) == ([], None)


@pytest.mark.parametrize(("task", "why"), [("OnlyOnChips", "cannot be computed on this machine"), ("Huge", "FLOP, more than")])
def test_what_cannot_be_tried_here_is_said(task, why):
    problems, facts = plan(task=f"{HERE}:{task}")
    assert problems == []
    assert facts["padding"].startswith(first_batch.LEFT_OUT)
    assert why in facts["padding"]


@pytest.mark.parametrize(
    "changes",
    [{"task": "tests.programs.faulty:Moody"}, {"data": {"sequence_length": 8, "dataset": "tests.programs.faulty:unseeded"}}],
    ids=["compiled", "read"],
)
def test_of_a_loss_that_is_another_each_time_nothing_is_said(changes):
    base = {"task": "tests.programs.tiny:TableTask", "data": {"sequence_length": 8, "dataset": "tests.programs.tiny:numbers"}}
    problems, facts = plan(**base | changes)
    assert problems == []
    assert "the loss of the same examples is another each time" in facts["padding"]


def test_the_projects_own_task_passes_the_trial_that_it_is_spared(monkeypatch):
    model = {"vocab_size": 256, "width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 16}
    data = {"paths": [__file__], "sequence_length": 8, "eval_fraction": 0.0}
    changes = {"task": "trainers.tasks.causal_lm:CausalLMTask", "data": data, "model": model, "loss": {"z_loss_weight": 0.1}}
    assert "padding" not in plan(**changes)[1]
    monkeypatch.setattr(first_batch, "is_own", lambda task: False)
    assert plan(**changes)[1]["padding"] == first_batch.CHECKED

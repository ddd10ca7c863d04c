"""From examples of any length to rows of fixed shapes; the hook on batches; metrics of rows; sources; data without an index."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gangway.errors import DataError, UsageError
from gangway.stop_reason import StopReason
from tests.programs.streams import Stream
from tests.programs.tiny import Numbers, TableTask
from tests.unit.training import FIXED, OneDevice, StopAt, arguments, assert_equal, losses, of, trainer
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.config import DataConfig, MeshConfig
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.data.collate import Collated, CollateInfo, check_numbers, collate
from trainers.data.iterated_loader import IteratedLoader
from trainers.data.sources.iterable import IterableSource
from trainers.parallel import mesh as meshes
from trainers.planning.estimate import plan
from trainers.protocol import Ids
from trainers.tasks.causal_lm import CausalLMTask

LENGTH = 9

# ---------------------------------------------------------------------- rows of fixed shapes


def row(length, truncation="keep_start", **info):
    example = {"tokens": np.arange(1, length + 1, dtype=np.int32), "sample_id": np.int32(7)}
    return collate(example, {"tokens": CollateInfo(length=4, **info)}, truncation)


@pytest.mark.parametrize(("transform", "weight"), [(lambda e: {"x": e["x"]}, 0.25), (lambda e: {"x": e["x"], "weight": 3}, 3.0)])
def test_an_example_keeps_its_weight_if_the_transform_does_not_know_it(transform, weight):
    examples = [{"x": np.zeros(2), "sample_id": np.int32(0), "weight": np.float32(0.25)}]
    assert Collated(examples, transform, {}, "keep_start")[0]["weight"] == weight


def test_what_is_short_is_filled_up_and_what_is_long_is_cut():
    assert row(2, pad_value=-1)["tokens"].tolist() == [1, 2, -1, -1]
    assert row(2, pad_value=-1, mask="seen")["seen"].tolist() == [1, 1, 0, 0]
    assert row(6)["tokens"].tolist() == [1, 2, 3, 4]
    assert row(6, "keep_end", mask="seen")["tokens"].tolist() == [3, 4, 5, 6]
    assert row(4, "keep_end")["tokens"].tolist() == row(4)["tokens"].tolist() == [1, 2, 3, 4]
    assert row(6)["tokens"].dtype == np.int32
    assert row(6)["sample_id"] == 7
    pixels = collate({"image": np.ones((2, 3))}, {"image": CollateInfo(length=3)}, "keep_start")["image"]
    assert pixels.shape == (3, 3)
    assert pixels.sum() == 6


def test_a_leaf_that_no_example_has_is_named():
    with pytest.raises(DataError, match="names image, absent from one with"):
        collate({"tokens": np.ones(2)}, {"image": CollateInfo(length=3)}, "keep_start")


def test_truncation_is_a_setting():
    assert from_dict(DataConfig, {"truncation": "keep_end"}).truncation == "keep_end"
    with pytest.raises(ValueError, match=r'truncation: expected one of keep_start, keep_end \(found "middle"\)'):
        from_dict(DataConfig, {"truncation": "middle"})


class Lengths(Numbers):
    """Example i has i % 13 + 2 tokens."""

    def __getitem__(self, index):
        sample = index % self.num_examples
        return {"tokens": np.arange(sample % 13 + 2, dtype=np.int32) + sample, "sample_id": np.int32(sample)}


class Masked(TableTask):
    """Shows which tokens it was given, and how many count."""

    def loss(self, model, batch):
        weight = batch["weight"][:, None] * batch["token_weight"][:, 1:]
        plain = super().loss(model, batch)
        rows = jnp.sum(batch["weight"])
        parts = {"targets": (jnp.sum(weight), rows), "first": (jnp.sum(batch["tokens"][:, 0] * batch["weight"]), rows)}
        return plain._replace(num_targets=jnp.sum(weight), parts=parts)


class Ragged(BaseTrainer):
    def build_data_transform(self):
        return lambda example: None if example["sample_id"] % 5 == 0 else {**example, "tokens": example["tokens"] + 1}

    def build_data_collate_info(self):
        return {"tokens": CollateInfo(length=LENGTH, mask="token_weight")}


def ragged(made):
    return Lengths(96, 0), Lengths(21, 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("truncation", ["keep_start", "keep_end"])
def test_ragged_examples_are_transformed_cut_and_filled_up_in_training_and_evaluation(tmp_path, events, truncation):
    made = arguments(
        tmp_path,
        task=f"{__name__}:Masked",
        trainer=f"{__name__}:Ragged",
        max_num_steps=2,
        data={"sequence_length": LENGTH, "dataset": f"{__name__}:ragged", "truncation": truncation},
    )
    assert plan(made, 8)[0] == []
    own = Ragged(made, *ragged(made))
    own.train()
    kept = [sample for sample in range(32) if sample % 5]
    targets = {sample: min(sample % 13 + 2, LENGTH) - 1 for sample in range(32)}
    firsts = {s: s + 1 + (max(s % 13 + 2 - LENGTH, 0) if truncation == "keep_end" else 0) for s in range(32)}
    published = [e["metrics"] for e in of(events, "metrics") if "loss" in e["metrics"]]
    for step, metrics in enumerate(published):
        samples = [sample for sample in kept if sample // 16 == step]
        assert metrics["targets"] == pytest.approx(np.mean([targets[s] for s in samples]))
        assert metrics["first"] == pytest.approx(np.mean([firsts[s] for s in samples]))
    assert own.output.metrics["samples"] == len(kept)
    assert own.output.metrics["tokens"] == sum(targets[s] for s in kept)
    assert own.output.metrics["eval_targets"] == pytest.approx(np.mean([targets[s] for s in range(21) if s % 5]))


def test_a_transform_that_leaves_everything_out_is_an_error():
    with pytest.raises(DataError, match="leaves out each of the first 1000 examples"):
        Collated(Numbers(96, 8), lambda example: None, {}, "keep_start")[0]


def test_examples_of_different_lengths_without_collate_info_say_what_to_do(tmp_path, events):
    made = arguments(tmp_path, data={"sequence_length": 8, "dataset": f"{__name__}:ragged"})
    with pytest.raises(
        DataError, match=r"example \d+: column \w+ is \w+\[\d+\], and \w+\[\d+\] in example \d+: override build_data_collate_info"
    ):
        BaseTrainer(made, *ragged(made)).train()


# ---------------------------------------------------------------------- numbers that a device or a vocabulary has not


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (
            np.array([[1], [3_000_000_000]]),
            r"column x \(int64\) has 3000000000: devices have numbers of 32 bits, from -2147483648",
        ),
        (np.array([[2**40], [1]]), "has 1099511627776"),
        (np.array([[1], [-(2**31) - 1]]), "has -2147483649"),
        (np.array([[1], [2**32]], np.uint64), r"\(uint64\) has 4294967296: .*, from 0 to 4294967295"),
        (np.array([[1.0], [1e60]]), r"\(float64\) has 1e\+60"),
        (np.array([[1.0], [-3.5e38]]), r"has -3\.5e\+38"),
    ],
)
def test_a_number_that_devices_have_not_is_refused_by_column_and_example(values, found):
    batch = {"x": values, "sample_id": np.array([4, 2**40])}
    with pytest.raises(
        DataError, match=rf"example {batch['sample_id'][int(abs(values[1, 0]) != 1)]}: .*{found}.*ignore_columns=\[x\]"
    ):
        check_numbers(batch, {})


def test_numbers_that_devices_have_are_taken():
    edges = {"a": np.array([2**31 - 1, -(2**31)]), "b": np.array([np.inf, np.nan, 3e38]), "c": np.array([2**32 - 1], np.uint64)}
    check_numbers({**edges, "d": np.zeros((0, 3)), "sample_id": np.array([2**40])}, {})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("leaf", "value", "found"),
    [
        ("tokens", -1, r"example 5: column tokens \(int32\) has -1: expected ids from 0 to 255; make it one"),
        ("tokens", -100, "has -100: expected ids from 0 to 255; make"),
        ("tokens", 256, "has 256: expected ids from 0 to 255"),
        ("labels", 256, "column labels .* has 256: expected ids from 0 to 255, or -100; make"),
        ("labels", -1, "column labels .* has -1: expected"),
    ],
)
def test_an_id_that_the_vocabulary_has_not_is_refused_by_example_column_and_value(tmp_path, leaf, value, found):
    class Bad(Numbers):
        def __getitem__(self, index):
            example = super().__getitem__(index)
            labels = np.where(np.arange(9) % 2, -100, example["tokens"])
            example = {**example, "labels": labels.astype(np.int32)}
            if example["sample_id"] == 5:
                example[leaf] = example[leaf].copy()
                example[leaf][3] = value
            return example

    model = {"vocab_size": 256, "width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "mlp_width": 16}
    settings = {"task": "trainers.tasks.causal_lm:CausalLMTask", "model": model}
    made = arguments(tmp_path, max_num_steps=1, data={"sequence_length": 8, "shuffle": False}, **settings)
    with pytest.raises(DataError, match=found):
        BaseTrainer(made, Bad(96, 8)).train()


def test_the_ids_of_a_loader_of_batches_are_looked_at_too(tmp_path):
    mesh = meshes.make_mesh(MeshConfig())
    batches = [{"tokens": np.full((8, 9), value, np.int32)} for value in (255, 256)]
    loader = IteratedLoader(batches, 8, mesh, ids={"tokens": Ids(256)})
    assert loader.batch(0)["tokens"].shape == (1, 8, 9)
    with pytest.raises(DataError, match=r"example 8: column tokens \(int32\) has 256: expected ids from 0 to 255"):
        loader.batch(1)


# ---------------------------------------------------------------------- the hook on batches


class Preprocessing(BaseTrainer):
    def preprocess_batch(self, batch, batch_index):
        batch["tokens"] = (batch["tokens"] + batch_index) % 256
        return batch, {"row_id": batch["sample_id"], "index": batch_index}


@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.slow("trains more than once")
def test_what_the_batch_hook_returns_is_trained_on_and_its_metrics_are_exact(tmp_path, events, accumulation_steps):
    made = trainer(
        tmp_path, cls=Preprocessing, global_batch_size=20, accumulation_steps=accumulation_steps, max_num_steps=3, optimizer=FIXED
    )
    made.train()
    published = [e["metrics"] for e in of(events, "metrics") if "loss" in e["metrics"]]
    assert [metrics["row_id"] for metrics in published] == [9.5, 29.5, 49.5]  # the rows that fill up do not count
    assert [metrics["index"] for metrics in published] == [0, 1, 2]
    assert made.output.metrics["eval_row_id"] == pytest.approx(10.0)  # 21 examples, the ragged end once
    several = losses(events)
    events.clear()
    one = trainer(tmp_path / "one", cls=PreprocessingOnOne, global_batch_size=20, max_num_steps=3, optimizer=FIXED)
    one.train()
    np.testing.assert_allclose(list(several.values()), list(losses(events).values()), rtol=2e-5)
    events.clear()
    trainer(tmp_path / "plain", global_batch_size=20, max_num_steps=3, optimizer=FIXED).train()
    assert list(several.values())[1:] != pytest.approx(list(losses(events).values())[1:], rel=1e-3)


class PreprocessingOnOne(Preprocessing, OneDevice):
    pass


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (lambda batch: {**batch, "tokens": batch["tokens"][:0]}, r"returned tokens \(0, 9\): expected leaves \[1, ...\]"),
        (lambda batch: {"tokens": batch["tokens"]}, "returned no weight or sample_id"),
    ],
)
def test_a_batch_of_another_form_is_an_error(tmp_path, returned, problem):
    class Bad(BaseTrainer):
        def preprocess_batch(self, batch, batch_index):
            return returned(batch)

    with pytest.raises(DataError, match=problem):
        trainer(tmp_path, cls=Bad).train()


def test_a_metric_of_the_batch_hook_may_not_hide_one_of_the_loss(tmp_path):
    class Clash(BaseTrainer):
        def preprocess_batch(self, batch, batch_index):
            return batch, {"accuracy": 1.0}

    with pytest.raises(UsageError, match="metrics that the loss has too: accuracy"):
        trainer(tmp_path, cls=Clash).train()


# ---------------------------------------------------------------------- sources


class TwoSources(Numbers):
    def __getitem__(self, index):
        example = super().__getitem__(index)
        return {**example, "source": np.int32(example["sample_id"] % 3 == 0)}


def two_sources(made):
    return TwoSources(96, made.data.sequence_length), TwoSources(21, made.data.sequence_length)


class WithRows(TableTask):
    """Its loss tells what each row adds; here simply its sample id, for every target."""

    def loss(self, model, batch):
        plain = super().loss(model, batch)
        row_targets = 8 * batch["weight"]
        return plain._replace(rows=(batch["sample_id"] * row_targets, row_targets))


def sources_trainer(folder, **changes):
    data = {"sequence_length": 8, "dataset": f"{__name__}:two_sources", "sources": ["web", "code"]}
    made = arguments(folder, **{"task": f"{__name__}:WithRows", "data": data, "optimizer": FIXED, "max_num_steps": 4, **changes})
    return BaseTrainer(made, *two_sources(made))


@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.slow("trains more than once")
def test_loss_and_tokens_of_each_source_are_exact_and_go_on_over_restarts(tmp_path, events, accumulation_steps):
    sources_trainer(tmp_path, accumulation_steps=accumulation_steps, max_num_steps=2).train()
    made = sources_trainer(tmp_path, accumulation_steps=accumulation_steps)
    made.train()
    published = {e["step"]: e["metrics"] for e in of(events, "metrics") if "loss" in e["metrics"]}
    for step, metrics in published.items():
        ids = np.arange(16 * (step - 1), 16 * step)
        assert metrics["loss/code"] == pytest.approx(ids[ids % 3 == 0].mean())
        assert metrics["loss/web"] == pytest.approx(ids[ids % 3 > 0].mean())
        assert metrics["total_tokens/code"] == 8 * len(range(0, 16 * step, 3))
        assert metrics["total_tokens/web"] == 8 * (16 * step - len(range(0, 16 * step, 3)))
    assert made.output.metrics["eval_loss/code"] == pytest.approx(np.mean(range(0, 21, 3)))


def test_the_causal_task_tells_the_loss_of_each_row_and_counts_what_has_weight():
    made = from_dict(TrainingArguments, {"name": "x", "max_num_steps": 1, "model": SMALL})
    task = CausalLMTask(made)
    tokens = np.arange(27).reshape(3, 9) * 7 % 256
    mask = np.ones((3, 9), np.float32)
    mask[1, 4:] = 0
    batch = {"tokens": jnp.asarray(tokens), "weight": jnp.array([1.0, 1.0, 0.0]), "token_weight": jnp.asarray(mask)}
    model = task.build_model(nnx.Rngs(0))
    loss = jax.jit(lambda batch: task.loss(model, batch))(batch)
    row_losses, row_targets, row_tokens = loss.rows
    assert row_targets.tolist() == row_tokens.tolist() == [8, 3, 0]
    assert float(loss.num_targets) == 11
    assert float(row_losses.sum()) == pytest.approx(float(loss.loss_sum))
    own = {"tokens": jnp.asarray(tokens[1:2, :4]), "weight": jnp.ones(1)}
    short = jax.jit(lambda batch: task.loss(model, batch))(own)
    assert float(row_losses[1]) == pytest.approx(float(short.loss_sum), rel=1e-5)  # what was filled up changes nothing


SMALL = {"width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "mlp_width": 16}


def test_sources_need_a_task_that_tells_the_loss_of_each_row(tmp_path):
    with pytest.raises(UsageError, match=r"data.sources = \['web', 'code'\]: expected .* the task's Loss has no `rows`"):
        sources_trainer(tmp_path, task="tests.programs.tiny:TableTask").train()
    with pytest.raises(ValueError, match=r"sources = \['a', 'a'\]: expected each name once"):
        DataConfig(sources=("a", "a"))


# ---------------------------------------------------------------------- data without an index


def stream(made):
    return Stream(70), Numbers(21, 8)


def stream_trainer(folder, *callbacks, cls=BaseTrainer, num_examples=70, **changes):
    data = {"sequence_length": 8, "dataset": f"{__name__}:stream"}
    made = arguments(folder, **{"data": data, "optimizer": FIXED, "max_num_steps": 100, **changes})
    return cls(made, Stream(num_examples), Numbers(21, 8), callbacks=callbacks)


def test_a_stream_ends_training_when_it_ends_with_its_last_example(tmp_path, events):
    made = stream_trainer(tmp_path)
    state = made.train()
    assert made.output.stop_reason is StopReason.END_OF_DATA
    assert int(state.batch_index) == 5
    assert made.output.metrics["samples"] == 70  # four whole batches and six rows
    told = "the data ended after 5 steps: max_num_steps = 100 was not reached"
    assert told in [event["message"] for event in of(events, "note")]
    assert "epoch" not in of(events, "metrics")[0]["metrics"]


@pytest.mark.slow("trains more than once")
def test_a_stream_goes_on_by_counting_and_says_what_that_cost(tmp_path, events):
    changes = {"global_batch_size": 8, "num_examples": 196, "checkpoint": {"save_steps": 2}}
    whole = stream_trainer(tmp_path / "whole", **changes)
    state = whole.train()
    assert not [event for event in of(events, "note") if "thrown away" in event["message"]]
    first = stream_trainer(tmp_path, StopAt(17, "requested"), **changes)
    first.train()
    reached = int(first.state.batch_index)
    events.clear()
    second = stream_trainer(tmp_path, **changes)
    runtime.install(runtime.Runtime(events.append))
    resumed = second.train()
    assert_equal(resumed, state)
    assert (whole.output.stop_reason, second.output.stop_reason) == (StopReason.END_OF_DATA,) * 2
    assert second.output.metrics["samples"] == 196
    told = [event["message"] for event in of(events, "note") if "thrown away" in event["message"]]
    assert len(told) == 1
    assert f"positioned: {8 * reached - 64} examples were read" in told[0]  # the last 64 are kept


@pytest.mark.slow("trains more than once")
def test_a_stream_that_has_ended_stays_ended(tmp_path, events):
    state = stream_trainer(tmp_path).train()
    again = stream_trainer(tmp_path)
    assert_equal(again.train(), state)
    assert again.output.stop_reason is StopReason.END_OF_DATA


@pytest.mark.slow("trains three times")
def test_an_end_that_is_known_early_waits_for_the_last_batch_whatever_is_saved(tmp_path, events):
    states = [stream_trainer(tmp_path / str(n), num_examples=160, checkpoint={"save_steps": n}).train() for n in (1, 3, 100)]
    assert [int(state.batch_index) for state in states] == [10, 10, 10]
    assert_equal(states[0], states[1])
    assert_equal(states[0], states[2])


def test_a_stream_reads_each_example_once_and_keeps_few(tmp_path, events):
    made = stream_trainer(tmp_path, num_examples=300, max_num_steps=12)
    made.train()
    source = made.dataset_train
    assert source.dataset.read <= 16 * (12 + 5)
    assert len(source._kept) <= source.num_kept


def test_a_place_far_back_begins_anew():
    told = []
    source = IterableSource(Stream(50), 8, told.append)
    assert [int(source[i]["sample_id"]) for i in (0, 30, 25, 2, 49)] == [0, 30, 25, 2, 49]
    assert len(told) == 2
    assert "22 examples were read and thrown away" in told[0]
    with pytest.raises(IndexError, match="ends after 50"):
        source[50]
    assert (source.available(10), source.available(80)) == (10, 50)


def test_what_cannot_be_read_is_refused_before_it_starts(tmp_path):
    with pytest.raises(UsageError, match=r"is an iterator .generator., which can be read only once"):
        BaseTrainer(arguments(tmp_path), (x for x in [{}]), None)
    with pytest.raises(UsageError, match="gave int: expected examples by index"):
        BaseTrainer(arguments(tmp_path), 5, None)
    epochs = arguments(tmp_path, max_num_steps=None, max_num_data_epochs=1, data={"dataset": f"{__name__}:stream"})
    assert any("max_num_data_epochs = 1: the training data is iterable" in problem for problem in plan(epochs, 8)[0])
    assert plan(arguments(tmp_path, data={"dataset": f"{__name__}:stream", "sequence_length": 8}), 8)[0] == []

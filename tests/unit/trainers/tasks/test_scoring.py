"""The tasks that score whole texts, a reward model and a classifier: what they compute, and how their decoder begins."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gangway.errors import UsageError
from tests import ROOT
from tests.programs.preferences import Pairs
from tests.unit.hf_folders import nested, parameters_of
from tests.unit.training import arguments, of
from trainers.base import BaseTrainer
from trainers.config import InitConfig
from trainers.config.arguments import TrainingArguments, dataset_function, from_dict
from trainers.data.sources.preference import preference_pairs
from trainers.step import rng
from trainers.tasks.classification import ClassificationTask
from trainers.tasks.reward import RewardTask
from trainers.tasks.scoring import ScoringDecoder

LLAMA = ROOT / "tests" / "unit" / "data" / "parity" / "llama3"
MODEL = {"vocab_size": 64, "width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 16}
LABELS = {"labels": ["a", "b", "c"]}


def task_of(cls, **changes):
    settings = {"name": "t", "max_num_steps": 1, "model": MODEL, "data": {"sequence_length": 8}, "classification": LABELS}
    return cls(from_dict(TrainingArguments, {**settings, **changes}))


def model_of(task):
    model = nnx.jit(lambda: task.build_model(nnx.Rngs(rng.key(0, "init", 0))))()
    model.head[...] = jax.random.normal(jax.random.key(3), model.head.shape)
    return model


def pairs_of(num_pairs):
    pairs = [Pairs(num_pairs, 5, False)[index] for index in range(num_pairs)]
    return {name: np.stack([pair[name] for pair in pairs]) for name in pairs[0]}


def last_scores(model, tokens, weight):
    """The head's scores of one text, cut off after its last token."""
    x = jax.jit(lambda model, tokens: model.hidden(tokens).x_BTD)(model, tokens[None, : np.flatnonzero(weight)[-1] + 1])
    return np.asarray(x[0, -1], np.float64) @ np.asarray(model.head[...], np.float64)


def test_the_loss_of_a_reward_model_is_that_of_bradley_and_terry():
    task, batch = task_of(RewardTask), pairs_of(3)
    model = model_of(task)
    found = jax.jit(task.loss)(model, batch)
    for row in range(3):
        rewards = [last_scores(model, batch["tokens"][row, side], batch["token_weight"][row, side])[0] for side in (0, 1)]
        assert float(found.losses[row]) == pytest.approx(np.logaddexp(0, rewards[1] - rewards[0]), rel=1e-4)
        assert float(found.metrics["rewards/chosen"][row]) == pytest.approx(rewards[0], rel=1e-4)
        assert float(found.metrics["rewards/rejected"][row]) == pytest.approx(rewards[1], rel=1e-4)
        assert float(found.metrics["rewards/margin"][row]) == pytest.approx(rewards[0] - rewards[1], rel=1e-3)
        assert float(found.metrics["accuracy"][row]) == (rewards[0] > rewards[1])
        assert float(found.num_tokens[row]) == batch["token_weight"][row].sum()


def test_the_loss_of_a_classifier_is_the_cross_entropy_of_the_label_at_the_last_token():
    task, pairs = task_of(ClassificationTask), pairs_of(4)
    model = model_of(task)
    batch = {
        "tokens": pairs["tokens"][:, 0],
        "token_weight": pairs["token_weight"][:, 0],
        "label": np.array([0, 1, 2, 1], np.int32),
    }
    found = jax.jit(task.loss)(model, batch)
    logits = np.stack([last_scores(model, batch["tokens"][row], batch["token_weight"][row]) for row in range(4)])
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(found.losses, -log_p[np.arange(4), batch["label"]], rtol=1e-4)
    np.testing.assert_array_equal(found.metrics["accuracy"], logits.argmax(-1) == batch["label"])
    np.testing.assert_array_equal(found.num_tokens, batch["token_weight"].sum(-1))
    np.testing.assert_allclose(jax.jit(task.predictions)(model, batch)["logits"], logits, rtol=1e-4)


def test_there_are_as_many_scores_as_labels_and_no_table_for_logits():
    names = {}
    for tied in (True, False):
        task = task_of(ClassificationTask, model={**MODEL, "tie_embeddings": tied})
        state = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda task=task: task.build_model(nnx.Rngs(0)))))
        assert state["head"].shape == (16, 3)
        names[tied] = set(state)
    assert names[True] == names[False] == {"embed", "layers", "final_norm", "head"}


@pytest.mark.parametrize(
    ("cls", "changes", "error"),
    [
        (ClassificationTask, {"classification": {}}, r"classification\.labels = \[\]: expected the names of the classes"),
        (RewardTask, {"lora": {"base": "x"}}, "lora: RewardTask trains a head too, which no adapter has"),
    ],
)
def test_settings_that_do_not_fit_are_errors(cls, changes, error):
    with pytest.raises(UsageError, match=error):
        task_of(cls, **changes)


def test_labels_are_at_least_two_and_each_once():
    for labels, error in ((["a"], "expected at least two"), (["a", "b", "a"], "expected each name once")):
        with pytest.raises(ValueError, match=error):
            task_of(ClassificationTask, classification={"labels": labels})


@pytest.mark.slow("compiles several steps")
def test_a_folder_fills_the_decoder_and_leaves_the_head(tmp_path, events):
    changes = {"global_batch_size": 8, "max_num_steps": 1, "previews": {"prompts": []}, "model": {"pretrained": str(LLAMA)}}
    optimizer = {"name": "sgd", "learning_rate": 1e-30, "schedule": {"name": "constant"}}
    made = arguments(tmp_path, task="trainers.tasks.reward:RewardTask", optimizer=optimizer, **changes)
    trainer = BaseTrainer(made, Pairs(16, 1, False))
    trainer.train()
    said = next(event["message"] for event in of(events, "note") if event["message"].startswith("init_from"))
    assert said.endswith("as in a new run: head")
    state = trainer.output.state.params
    expected = nested(parameters_of(LLAMA))
    for name in ("embed", "final_norm"):
        np.testing.assert_array_equal(state[name], expected[name])
    for name, value in expected["layers"].items():
        np.testing.assert_array_equal(state["layers"][name], value)
    assert state["head"].shape == (32, 1)
    assert float(jnp.std(state["head"])) > 0
    metrics = next(event["metrics"] for event in of(events, "metrics") if "loss" in event["metrics"])
    assert "perplexity" not in metrics
    # What the user leaves out stays out; a run of one's own has a head.
    kept = arguments(tmp_path, task="trainers.tasks.reward:RewardTask", init_from={"path": str(LLAMA), "exclude": ["^embed"]})
    assert BaseTrainer(kept).arguments.init_from == InitConfig(path=str(LLAMA), exclude=("^embed", "^head$", "^unembed$"))
    other = arguments(tmp_path, task="trainers.tasks.reward:RewardTask", init_from=str(tmp_path / "run"))
    assert BaseTrainer(other).arguments.init_from == InitConfig(path=str(tmp_path / "run"))


def test_a_task_may_name_its_dataset_and_the_settings_another_one():
    default = task_of(RewardTask, task="trainers.tasks.reward:RewardTask").arguments
    assert dataset_function(default) is preference_pairs
    named = task_of(RewardTask, task="trainers.tasks.reward:RewardTask", data={"dataset": "tests.programs.preferences:datasets"})
    assert dataset_function(named.arguments).__module__ == "tests.programs.preferences"
    assert dataset_function(task_of(RewardTask).arguments).__name__ == "text_windows"


def test_flops_are_those_of_a_decoder_without_logits():
    task = task_of(RewardTask)
    num_parameters = 10**5
    attention = 12 * 4 * 16
    assert task.flops_per_token(num_parameters) == 6 * (num_parameters - 64 * 16) + attention
    assert task.tokens_per_example == 16
    assert isinstance(nnx.eval_shape(lambda: task.build_model(nnx.Rngs(0))), ScoringDecoder)

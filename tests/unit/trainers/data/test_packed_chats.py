"""Conversations packed into rows have the loss of conversations that have a row each, and the same targets."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from flax import nnx

from gangway.errors import UsageError
from tests.unit import chat_folders
from trainers.config.arguments import TrainingArguments, dataset_function, from_dict
from trainers.step import rng
from trainers.tasks.causal_lm import CausalLMTask

LENGTH = 96
MODEL = {"vocab_size": chat_folders.NUM_IDS, "width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 16}


def arguments(tmp_path, **data):
    settings = {
        "name": "t",
        "max_num_steps": 1,
        "model": {
            "vocab_size": chat_folders.NUM_IDS,
            "width": 16,
            "num_layers": 1,
            "num_heads": 2,
            "num_kv_heads": 1,
            "mlp_width": 16,
        },
        "data": {
            **{"paths": [str(tmp_path / "chats.jsonl")], "tokenizer": str(tmp_path / "folder"), "sequence_length": LENGTH},
            **{"eval_fraction": 0.0, "shuffle": False, **data},
        },
    }
    return from_dict(TrainingArguments, settings)


@pytest.fixture
def chats(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    chat_folders.write(tmp_path / "folder")
    turns = [[("user", "hi" * (n % 3)), ("assistant", "yes" * (1 + n % 4))] for n in range(12)]
    messages = [[{"role": role, "content": content} for role, content in each] for each in turns]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages))
    return tmp_path


@pytest.mark.slow("trains more than once")
def test_packed_conversations_have_the_loss_of_a_row_each(chats):
    totals, num_rows = {}, {}
    for name, data in {"apart": {"dataset": CONVERSATIONS}, "packed": {"packing": "fit"}}.items():
        made = arguments(chats, **data)
        task, train = CausalLMTask(made), dataset_function(made)(made)[0]
        rows = [train[index] for index in range(len(train))]
        leaves = {leaf for leaf in rows[0] if leaf in ("tokens", "token_weight", "segments", "positions")}
        batch = {leaf: np.stack([row[leaf] for row in rows]) for leaf in leaves}
        model = nnx.jit(lambda task=task: task.build_model(nnx.Rngs(rng.key(0, "init", 0))))()
        loss = jax.jit(task.loss)(model, {**batch, "weight": np.ones(len(rows), np.float32)})
        totals[name], num_rows[name] = (float(loss.loss_sum), float(loss.num_targets)), len(rows)
    assert num_rows["packed"] < num_rows["apart"] == 12
    assert totals["packed"] == pytest.approx(totals["apart"], rel=1e-5)


CONVERSATIONS = "trainers.data.sources.conversations:conversations"


def test_conversations_as_plain_text_are_an_error_that_says_what_to_set(chats):
    made = arguments(chats)
    with pytest.raises(UsageError, match=r"trains on each token.*set data\.packing=fit"):
        dataset_function(made)(made)

"""What LoRA trains whole: tables with rows for new tokens, in checkpoints and in exports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from gangway.errors import UsageError
from tests.unit.trainers.test_lora import LLAMA, SETTINGS, arguments, checkpoint, logits, plain_logits, trainer
from tests.unit.training import assert_equal
from trainers.checkpoint import export
from trainers.commands import evaluate
from trainers.config import ModelConfig
from trainers.config.arguments import from_dict
from trainers.optim.param_groups import parameter_paths
from trainers.planning import estimate
from trainers.trainer.beginnings import beginning

NEW = 3
LORA = {"rank": 2, "alpha": 8, "targets": ["query"], "whole": ["embed|unembed"], "new_tokens": NEW}
CHANGES = {"lora": LORA, "max_num_steps": 2, "previews": {"prompts": []}, "mesh": {"data": 8}}
TOKENS = np.random.default_rng(3).integers(2, 64 + NEW, (2, 8)).astype(np.int32)


def table(name):
    return load_file(Path(LLAMA) / "model.safetensors")[name]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    made = trainer(tmp_path_factory.mktemp("whole"), **CHANGES)
    made.train()
    return made


@pytest.mark.slow("trains")
def test_the_tables_are_trained_and_saved_with_the_adapters(trained):
    names = {"embed", "unembed", "layers.query_lora_a", "layers.query_lora_b"}
    assert {*parameter_paths(trained.output.state.params)} == names
    assert trained.output.state.params["embed"].shape == (64 + NEW, 32)
    assert trained.arguments.model.vocab_size == 64 + NEW
    assert np.abs(trained.output.state.params["embed"][:64] - table("model.embed_tokens.weight")).max() > 0.01


def test_they_begin_as_those_of_the_base_and_new_tokens_as_the_mean(trained):
    first = trained.initial_state().params
    old = table("model.embed_tokens.weight")
    np.testing.assert_array_equal(first["embed"][:64], old)
    np.testing.assert_allclose(first["embed"][64:], np.repeat(old.mean(0, keepdims=True), NEW, 0), rtol=1e-5, atol=1e-6)
    old = table("lm_head.weight").T
    np.testing.assert_array_equal(first["unembed"][:, :64], old)
    np.testing.assert_allclose(first["unembed"][:, 64:], np.repeat(old.mean(1, keepdims=True), NEW, 1), rtol=1e-5, atol=1e-6)
    # The first step begins with them too, and with no others.
    assert_equal(beginning(trained).make().params, first)


def test_merged_they_are_the_tables_of_the_model(trained, tmp_path):
    export.to_hugging_face(checkpoint(trained), tmp_path / "merged")
    about = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert about["vocab_size"] == 64 + NEW
    written = load_file(tmp_path / "merged" / "model.safetensors")
    np.testing.assert_array_equal(written["model.embed_tokens.weight"], trained.output.state.params["embed"])
    adapted = logits(trained, trained.output.state.params, trained.frozen["base"], TOKENS)
    merged = plain_logits(tmp_path / "merged", TOKENS, trained.arguments.model)
    assert np.abs(merged - adapted).max() < 1e-5 * np.abs(adapted).max()


def test_the_form_of_peft_has_them_as_modules_to_save(trained, tmp_path):
    export.to_hugging_face(checkpoint(trained), tmp_path / "adapter", adapter=True)
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (about["modules_to_save"], about["target_modules"]) == (["embed_tokens", "lm_head"], ["q_proj"])
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    unembed = np.asarray(trained.output.state.params["unembed"])
    np.testing.assert_array_equal(written["base_model.model.lm_head.weight"], unembed.T)
    assert "base_model.model.model.embed_tokens.weight" in written


@pytest.mark.slow("trains several times; that of tests/unit/trainers/test_lora.py is in `make test`")
def test_a_run_goes_on_bit_for_bit(trained, tmp_path):
    trainer(tmp_path, **{**CHANGES, "max_num_steps": 1, "checkpoint": {"save_steps": 1}}).train()
    again = trainer(tmp_path, **CHANGES)
    again.train()
    assert_equal(trained.output.state, again.output.state)


def test_the_command_that_evaluates_gives_the_numbers_of_the_training(trained, tmp_path):
    made = evaluate.build(arguments(tmp_path, **{**SETTINGS, **CHANGES}))
    [result] = evaluate.evaluate(made, str(checkpoint(trained)))
    [base] = evaluate.evaluate(made, LLAMA)
    assert result.metrics["loss"] != pytest.approx(base.metrics["loss"], rel=1e-3)
    recorded = from_dict(ModelConfig, json.loads((checkpoint(trained) / "meta.json").read_text())["arguments"]["model"])
    assert recorded.vocab_size == 64 + NEW


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        ({"whole": ["embedd"], "new_tokens": 0}, r"lora\.whole: 'embedd' is the name of no parameter: they are .*mean embed"),
        ({"whole": ["query"], "new_tokens": 0}, r"lora\.whole: layers\.query has an adapter too: name it in lora\.targets or"),
        (
            {"whole": []},
            r"lora\.new_tokens = 3: the rows of new tokens must be trained, and embed, unembed is not; set lora\.whole",
        ),
        ({"whole": ["embed"]}, r"must be trained, and unembed is not; set lora\.whole: \[embed\|unembed\]"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_machine_is_taken(tmp_path, lora, told):
    problems, _ = estimate.plan(arguments(tmp_path, **{**SETTINGS, "lora": {**LORA, **lora}}), 8)
    assert any(re.search(told, problem) for problem in problems), problems


def test_a_norm_that_is_trained_whole_has_no_form_in_peft():
    from trainers.config import LoraConfig
    from trainers.models.hf.peft import to_adapter

    with pytest.raises(
        UsageError, match=r"final_norm: the form of PEFT has embed, unembed whole, and no other parameter; export"
    ):
        to_adapter(ModelConfig(tie_embeddings=False), LoraConfig(), {"final_norm": np.ones(4)}, "")


def test_a_base_without_the_new_tokens_is_no_reference(tmp_path):
    made = trainer(tmp_path, task="tests.programs.small_tokens:PreferenceTask", **CHANGES)
    with pytest.raises(UsageError, match=r"lora\.new_tokens = 3: the loss of PreferenceTask compares the model with its base"):
        made.configure_model()

"""LoRA: what is trained and saved, its base, its export, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from gangway.errors import CheckpointError, CheckpointMissingError, UsageError
from gangway.storage.opening import place_of
from tests import ROOT
from tests.programs.small_tokens import datasets, log_probabilities
from tests.saved import saved
from tests.unit.hf_folders import nested, parameters_of
from tests.unit.training import arguments, assert_equal, of
from trainers.base import BaseTrainer
from trainers.checkpoint import export, manifest
from trainers.commands import evaluate, saved_models
from trainers.commands import export as command
from trainers.models.decoder import Decoder
from trainers.planning import estimate
from trainers.trainer.beginnings import beginning

LLAMA, QWEN = (str(ROOT / "tests" / "unit" / "data" / "parity" / name) for name in ("llama3", "qwen2"))
SETTINGS = {
    "task": "trainers.tasks.causal_lm:CausalLMTask",
    "model": {"pretrained": LLAMA},
    "lora": {"rank": 4, "alpha": 6, "dropout": 0.25, "targets": ["query|value", r"layers\.down"]},
    "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
    "accumulation_steps": 2,
    "max_num_steps": 4,
    "optimizer": {"name": "adamw", "learning_rate": 0.05, "schedule": {"name": "constant"}},
    "checkpoint": {"save_steps": 2, "save_total_limit": None},
    "evaluation": {"every_steps": 4},
    "previews": {"prompts": ["!0"], "num_tokens": 4},
    "data": {"sequence_length": 8, "dataset": "tests.programs.small_tokens:datasets"},
}


def trainer(storage, **changes):
    made = arguments(storage, **{**SETTINGS, **changes})
    return BaseTrainer(made, *datasets(made))


def logits(made, params, frozen, tokens):
    model = jax.jit(lambda params, frozen: made.model.merge(params, frozen=frozen)(tokens))
    return np.asarray(model(jax.device_get(params), jax.device_get(frozen)))


def plain_logits(folder, tokens, config):
    """Of the decoder without adapters."""
    graph, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, nested(parameters_of(Path(folder)))))
    return np.asarray(jax.jit(lambda state: nnx.merge(graph, state)(tokens))(state))


TOKENS = np.random.default_rng(3).integers(2, 60, (2, 8)).astype(np.int32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    made = trainer(tmp_path_factory.mktemp("trained"))
    made.train()
    return made


def checkpoint(made):
    return Path(made.output.checkpoint_path)


@pytest.mark.slow("trains more than once")
def test_only_adapters_are_trained_and_saved(trained):
    names = {f"{name}_lora_{end}" for name in ("query", "value", "down") for end in "ab"}
    assert set(trained.output.state.params) == {"layers"}
    assert set(trained.output.state.params["layers"]) == names
    meta = manifest.read_meta(place_of(checkpoint(trained)))
    assert all("_lora_" in name for name in meta["shapes"] if ".params" in name or "mu" in name or "nu" in name)
    # [L, in, rank] and [L, rank, out] of 32, 16 and 48.
    parameters = 2 * 4 * ((32 + 32) + (32 + 16) + (48 + 32))
    assert trained.output.metrics["num_parameters"] == parameters
    assert sum(leaf.size for leaf in jax.tree.leaves(trained.output.state.opt_state) if leaf.ndim) == 2 * parameters
    assert meta["frozen"]["base"]["checkpoint"] == LLAMA
    for leaf in jax.tree.leaves(trained.output.state.params):
        assert not leaf.sharding.is_fully_replicated


@pytest.mark.slow("trains more than once")
def test_with_b_zero_it_is_the_base_and_training_changes_it(trained):
    params, _ = jax.jit(lambda: trained_first(trained))()
    base = plain_logits(LLAMA, TOKENS, trained.arguments.model)
    np.testing.assert_array_equal(logits(trained, params, trained.frozen["base"], TOKENS), base)
    assert np.abs(logits(trained, trained.output.state.params, trained.frozen["base"], TOKENS) - base).max() > 0.1


def trained_first(made):
    from trainers.step.state import initial_model

    return initial_model(made.task, made.arguments.seed, made.arguments.lora)


def test_the_first_adapters_depend_on_the_seed_and_the_name(trained):
    first = jax.jit(lambda: trained_first(trained))()[0]["layers"]
    assert_equal(first, jax.jit(lambda: trained_first(trained))()[0]["layers"])
    assert not np.array_equal(first["query_lora_a"], first["value_lora_a"])
    # Uniform, with the variance 1 / (3 in).
    assert np.abs(first["down_lora_a"]).max() <= 48**-0.5
    assert np.std(first["down_lora_a"]) == pytest.approx((3 * 48) ** -0.5, rel=0.2)
    assert not any(np.any(value) for name, value in first.items() if name.endswith("_b"))


@pytest.mark.slow("compiles two models")
def test_merged_it_computes_the_same(trained, tmp_path):
    export.to_hugging_face(checkpoint(trained), tmp_path / "merged")
    merged = plain_logits(tmp_path / "merged", TOKENS, trained.arguments.model)
    adapted = logits(trained, trained.output.state.params, trained.frozen["base"], TOKENS)
    assert np.abs(merged - adapted).max() < 1e-5 * np.abs(adapted).max()
    before, after = load_file(Path(LLAMA) / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    changed = {name.split(".")[-2] for name, value in before.items() if not np.array_equal(value, after[name])}
    assert changed == {"q_proj", "v_proj", "down_proj"}


def test_the_adapter_alone_is_exported_too(trained, tmp_path, capsys):
    assert command.main([str(checkpoint(trained)), str(tmp_path / "adapter"), "--format", "huggingface", "--adapter"]) == 0
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (about["base_model_name_or_path"], about["r"], about["lora_alpha"]) == (LLAMA, 4, 6.0)
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    b = trained.output.state.params["layers"]["value_lora_b"]
    np.testing.assert_array_equal(written["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"], np.asarray(b)[1].T)
    assert command.main([str(checkpoint(trained)), str(tmp_path / "own.safetensors"), "--adapter"]) == 0
    assert_equal(trained.output.state.params, export.from_safetensors(tmp_path / "own.safetensors"))


def test_an_export_finds_a_base_that_was_moved_and_no_other_one(trained, tmp_path, capsys):
    moved = shutil.copytree(LLAMA, tmp_path / "moved")
    assert command.main([str(checkpoint(trained)), str(tmp_path / "a"), "--format", "huggingface", "--base", str(moved)]) == 0
    assert command.main([str(checkpoint(trained)), str(tmp_path / "b"), "--format", "huggingface", "--base", QWEN]) == 2
    assert f"the adapters were trained on {LLAMA} (digest " in capsys.readouterr().err


def test_a_run_goes_on_bit_for_bit(trained, tmp_path, events):
    trainer(tmp_path, max_num_steps=2, evaluation={}, previews={"prompts": []}).train()
    again = trainer(tmp_path)
    again.train()
    assert [event["step"] for event in of(events, "restored")] == [2]
    assert_equal(trained.output.state, again.output.state)


@pytest.mark.slow("trains more than once")
def test_another_base_is_refused_and_both_are_named(trained, tmp_path, events):
    run = shutil.copytree(checkpoint(trained).parents[1], tmp_path / "run")
    other = shutil.copytree(LLAMA, tmp_path / "other")
    file = other / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(CheckpointError, match=r"lora\.base: the run has been trained with .* is another one; bring") as caught:
        trainer(tmp_path, model={"pretrained": str(other)}, max_num_steps=6).train()
    assert LLAMA in str(caught.value)
    assert str(other) in str(caught.value)
    # The same one at another place is not another one.
    same = shutil.copytree(LLAMA, tmp_path / "same")
    trainer(tmp_path, model={"pretrained": str(same)}).train()
    problems, _ = estimate.plan(arguments(tmp_path, **{**SETTINGS, "model": {"pretrained": str(other)}}), 8)
    assert [problem for problem in problems if "is another one" in problem]
    assert (saved(run, 4)).exists()


def test_a_base_that_changes_or_goes_is_named(tmp_path, events):
    folder = shutil.copytree(LLAMA, tmp_path / "base")
    settings = {"model": {"pretrained": str(folder)}, "max_num_steps": 1, "evaluation": {}, "previews": {"prompts": []}}
    trainer(tmp_path, **settings).train()
    lora = {**SETTINGS["lora"], "base": str(folder)}
    trainer_ = trainer(tmp_path, **{**settings, "max_num_steps": 2, "lora": lora})
    shutil.rmtree(folder)
    with pytest.raises(CheckpointMissingError, match=rf"lora\.base: there is no {folder}; the run has been trained with it"):
        trainer_.train()
    # Here the folder was read already, as the configuration.
    with pytest.raises(ValueError, match="No such file"):
        trainer(tmp_path, **settings)


@pytest.mark.slow("trains more than once")
def test_the_base_has_its_own_type_on_the_devices(tmp_path, events):
    lora = {**SETTINGS["lora"], "base_dtype": "bfloat16"}
    made = trainer(tmp_path, lora=lora, max_num_steps=1, evaluation={}, previews={"prompts": []})
    made.train()
    assert {leaf.dtype for leaf in jax.tree.leaves(made.frozen)} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(made.output.state.params)} == {jnp.dtype(jnp.float32)}
    stored = load_file(Path(LLAMA) / "model.safetensors")["model.norm.weight"]
    np.testing.assert_array_equal(made.frozen["base"]["final_norm"], stored.astype(jnp.bfloat16))


def test_the_command_that_evaluates_gives_the_numbers_of_the_training(trained, tmp_path, capsys):
    made = evaluate.build(arguments(tmp_path, **SETTINGS))
    [result] = evaluate.evaluate(made, str(checkpoint(trained)))
    assert result.metrics["loss"] == trained.output.metrics["eval_loss"]
    assert made.frozen.keys() == {"base"}


@pytest.mark.slow("trains and evaluates")
def test_a_model_without_adapters_is_measured_as_it_is(trained, tmp_path, capsys):
    config = tmp_path / "lora.yaml"
    given = {**SETTINGS, "name": "run", "storage": str(tmp_path), "global_batch_size": 16, "publish_every_steps": 1}
    config.write_text(json.dumps(given))

    def losses(*words):
        assert evaluate.main([*map(str, words), "--json"]) == 0
        return [row["metrics"]["loss"] for row in json.loads(capsys.readouterr().out)]

    (plain,) = losses(config, "lora=null", "--checkpoint", LLAMA)
    tuned = trained.output.metrics["eval_loss"]
    assert losses(LLAMA, config) == pytest.approx([plain], rel=1e-6)
    assert plain != pytest.approx(tuned, rel=1e-3)
    # Both beside each other; the settings of the run itself are those that it has recorded.
    assert losses(config, "--checkpoint", LLAMA, "--checkpoint", checkpoint(trained)) == pytest.approx([plain, tuned], rel=1e-6)
    assert losses(checkpoint(trained), "--trust-code", "tests.programs.small_tokens:datasets") == [tuned]


def test_a_base_that_has_moved_is_that_of_the_configuration(tmp_path, monkeypatch):
    def with_base(path):
        return arguments(tmp_path, **{**SETTINGS, "lora": {"rank": 4, "base": str(path)}})

    monkeypatch.setattr("trainers.commands.saved_models.look", lambda source: source)
    monkeypatch.setattr("trainers.commands.saved_models.arguments_of", lambda found: with_base(tmp_path / found))
    assert saved_models.with_model_of("gone", with_base(LLAMA)).lora.base == LLAMA
    (tmp_path / "there").mkdir()
    assert saved_models.with_model_of("there", with_base(LLAMA)).lora.base == str(tmp_path / "there")
    assert saved_models.with_model_of("gone", arguments(tmp_path, **{**SETTINGS, "lora": None})).lora.base == str(
        tmp_path / "gone"
    )


@pytest.mark.slow("trains more than once")
def test_a_preference_is_measured_against_the_base_without_a_second_model(tmp_path, events):
    task = "tests.programs.small_tokens:PreferenceTask"
    made = trainer(tmp_path, task=task, max_num_steps=2, evaluation={"at_start": True}, previews={"prompts": []})
    made.train()
    losses = [event["metrics"]["eval_loss"] for event in of(events, "metrics") if "eval_loss" in event["metrics"]]
    # With B = 0 the policy is the reference.
    assert losses[0] == pytest.approx(np.log(2))
    rows = jnp.asarray(datasets(None)[1].rows)
    pairs = (rows, rows[:, ::-1])

    def row_sums(params, base):
        return [log_probabilities(made.model.merge(params, frozen=base), tokens) for tokens in pairs]

    base = jax.device_get(made.frozen["base"])
    policy = jax.jit(row_sums)(jax.device_get(made.output.state.params), base)
    reference = jax.jit(row_sums)(jax.tree.map(np.zeros_like, jax.device_get(made.output.state.params)), base)
    margin = (policy[0] - reference[0]) - (policy[1] - reference[1])
    assert losses[-1] == pytest.approx(float(jnp.mean(jnp.log1p(jnp.exp(-0.5 * margin)))), rel=1e-5)


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        (
            {"targets": ["querry"]},
            r"'querry' is the name of no parameter: linear weights are .*layers\.query.*did you mean query",
        ),
        ({"targets": ["attention_norm"]}, r"'attention_norm' is the name of layers\.attention_norm, no linear weight: linear"),
        ({"targets": ["embed"]}, "'embed' is the name of embed, no linear weight"),
        ({"rank": 17}, r"lora\.rank = 17: layers\.key is \[32, 16\]: expected at most 16"),
    ],
)
def test_what_cannot_be_adapted_is_refused_before_a_machine_is_taken(tmp_path, lora, told):
    import re

    problems, _ = estimate.plan(arguments(tmp_path, **{**SETTINGS, "lora": lora}), 8)
    assert any(re.search(told, problem) for problem in problems), problems


def test_the_dry_run_counts_what_is_trained(tmp_path):
    problems, facts = estimate.plan(arguments(tmp_path, **SETTINGS), 8)
    assert problems == []
    assert facts["parameters"] == 2 * 4 * ((32 + 32) + (32 + 16) + (48 + 32))
    base = sum(value.size for value in load_file(Path(LLAMA) / "model.safetensors").values())
    assert facts["frozen_parameters"] == {"base": base}
    assert 4 * base / 8 < facts["frozen_bytes_per_device"] < 4 * base / 2
    assert facts["frozen"]["base"].endswith(f"from {LLAMA} (llama of Hugging Face)")
    assert facts["checkpoint_bytes"] < 4 * facts["parameters"] * 3 + 1000


def test_without_a_base_it_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"lora\.base = null: nothing names the weights to adapt"):
        arguments(tmp_path, lora={"rank": 2})
    with pytest.raises(ValueError, match=r"frozen\.base: with lora this is the name"):
        arguments(tmp_path, **{**SETTINGS, "frozen": {"base": LLAMA}})
    with pytest.raises(UsageError, match="frozen: the loss of CausalLMTask has no parameter `frozen`"):
        trainer(tmp_path, frozen={"teacher": LLAMA}).configure_model()


PEFT = ROOT / "tests" / "unit" / "data" / "peft"
OF_PEFT = {"rank": 4, "alpha": 6, "targets": ["query|value|down"]}


@pytest.mark.slow("trains")
def test_a_run_begins_with_an_adapter_of_peft(tmp_path, events):
    """On a mesh; its logits are those that PEFT computes. What a run exports, another one begins with."""
    expected = load_file(PEFT / "llama3" / "expected.safetensors")
    changes = {"max_num_steps": 1, "evaluation": {}, "previews": {"prompts": []}, "lora": OF_PEFT}
    made = trainer(tmp_path, **changes, init_from=str(PEFT / "llama3"), optimizer={"learning_rate": 1e-30})
    made.train()
    found = logits(made, made.output.state.params, made.frozen["base"], expected["tokens"])
    assert np.abs(found - expected["logits"]).max() < 1e-5 * np.abs(expected["logits"]).max()
    notes = [event["message"] for event in of(events, "note")]
    assert any(f"6 of 6 parameters are those of {PEFT / 'llama3'} (an adapter of PEFT" in note for note in notes), notes
    export.to_hugging_face(checkpoint(made), tmp_path / "adapter", adapter=True)
    again = trainer(tmp_path / "again", **changes, init_from=str(tmp_path / "adapter"))
    again.prepare()
    assert_equal(beginning(again).make().params, made.output.state.params)


def test_an_adapter_of_peft_that_does_not_fit_is_reported_before_a_machine_is_taken(tmp_path):
    def problems(**changes):
        return estimate.plan(arguments(tmp_path, **{**SETTINGS, "init_from": str(PEFT / "llama3"), **changes}), 8)[0]

    assert problems(lora=OF_PEFT) == []
    told, *_ = problems(lora={**OF_PEFT, "rank": 2})
    assert told.startswith(f"init_from: {PEFT / 'llama3'}: lora.rank = 2: self_attn.q_proj has the rank 4 there")
    told, *_ = problems(lora=None)
    assert "is an adapter of PEFT: a run with the section lora begins with it, by init_from" in told

"""Models in the files of other programs: one file, the form of Hugging Face against its formulas, damage, the callback."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from gangway.errors import CheckpointError, UsageError
from gangway.storage import ours
from tests.programs.processes import PATIENCE_S
from tests.unit.trainers.checkpoint.test_assets import Tokenizer
from tests.unit.training import assert_equal, of, trainer
from trainers.base import BaseTrainer
from trainers.callbacks import Callback, hugging_face
from trainers.callbacks.hugging_face import HuggingFaceExport
from trainers.checkpoint import weights
from trainers.checkpoint.array_io import ArrayFiles
from trainers.commands import export as command
from trainers.export import from_safetensors, to_hugging_face, to_safetensors
from trainers.trainer.model_design import evaluated_parameters

LLAMA = {
    "task": "trainers.tasks.causal_lm:CausalLMTask",
    "model": {"width": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "mlp_width": 48, "tie_embeddings": False},
    "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
    "max_num_steps": 2,
    "checkpoint": {"save_steps": 1},
    "previews": {"prompts": []},
    "evaluation": {"max_batches": 1},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    made = trainer(tmp_path_factory.mktemp("trained"), **LLAMA)
    made.train()
    return made


def run_folder(made):
    return Path(made.output.checkpoint_path).parents[1]


@pytest.mark.slow("trains, and reads what was exported")
def test_one_file_has_all_of_a_sharded_model_and_can_be_trained_on(trained, tmp_path):
    file = tmp_path / "model.safetensors"
    to_safetensors(trained.output.checkpoint_path, file)
    params = from_safetensors(file)
    assert_equal(trained.output.state.params, params)
    again = trainer(tmp_path, **{**LLAMA, "max_num_steps": 1})
    state = again.train(model_parameters=params)
    assert int(state.step) == 1
    assert [path.name for path in tmp_path.iterdir() if "saving" in path.name] == []


@pytest.mark.parametrize("groups", [[], [{"pattern": "out", "learning_rate": 0.1}]])
@pytest.mark.slow("trains, and reads what was exported")
def test_of_a_schedule_free_run_the_averages_are_exported(tmp_path, groups):
    optimizer = {"name": "schedule_free_adamw", "learning_rate": 0.01, "schedule": {"name": "constant"}, "groups": groups}
    made = trainer(tmp_path, max_num_steps=4, optimizer=optimizer)
    state = made.train()
    to_safetensors(made.output.checkpoint_path, tmp_path / "model.safetensors")
    exported, evaluated = from_safetensors(tmp_path / "model.safetensors"), evaluated_parameters(state)
    for name in ("embed", "out"):
        np.testing.assert_allclose(exported[name], evaluated[name], rtol=1e-5)
        assert not np.allclose(exported[name], state.params[name], rtol=1e-5)
    with pytest.raises(ValueError, match=r"keep_model_only = 'every': expected 'none', for the averages"):
        trainer(tmp_path, optimizer=optimizer, checkpoint={"keep_every_steps": 2, "keep_model_only": "every"})


def hugging_face_logits(folder, tokens):
    """LlamaForCausalLM as its documentation has it, in NumPy: y = x W^T, rotate_half, repeat_kv."""
    config = json.loads((folder / "config.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    weights = {name: value.astype(np.float64) for file in files for name, value in load_file(file).items()}
    heads, kv_heads, channels = (config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    time = len(tokens)

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T

    def norm(x, name):
        return weights[f"{name}.weight"] * (x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config["rms_norm_eps"]))

    def split(x, number):
        return x.reshape(time, number, channels).transpose(1, 0, 2)

    inv_freq = 1.0 / config["rope_theta"] ** (np.arange(0, channels, 2) / channels)
    freqs = np.outer(np.arange(time), inv_freq)
    embedded = np.concatenate([freqs, freqs], -1)
    cos, sin = np.cos(embedded), np.sin(embedded)

    def rotate_half(x):
        return np.concatenate([-x[..., channels // 2 :], x[..., : channels // 2]], -1)

    def rope(x):
        return x * cos + rotate_half(x) * sin

    x = weights["model.embed_tokens.weight"][tokens]
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        h = norm(x, f"{layer}.input_layernorm")
        query = rope(split(linear(h, f"{layer}.self_attn.q_proj"), heads))
        key = np.repeat(rope(split(linear(h, f"{layer}.self_attn.k_proj"), kv_heads)), heads // kv_heads, 0)
        value = np.repeat(split(linear(h, f"{layer}.self_attn.v_proj"), kv_heads), heads // kv_heads, 0)
        scores = query @ key.transpose(0, 2, 1) / np.sqrt(channels) + np.triu(np.full((time, time), -1e30), 1)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (p / p.sum(-1, keepdims=True) @ value).transpose(1, 0, 2).reshape(time, heads * channels)
        x = x + linear(mixed, f"{layer}.self_attn.o_proj")
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate = linear(h, f"{layer}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
    x = norm(x, "model.norm")
    return x @ weights["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"].T


TOKENS = np.random.default_rng(0).integers(0, 256, 11, np.int32)


def own_logits(made):
    params = jax.device_put(made.output.state.params, jax.devices()[0])
    return np.asarray(jax.jit(lambda params, tokens: made.model.merge(params)(tokens))(params, TOKENS[None]))[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_permissions_of_the_user(trained, tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        to_safetensors(trained.output.checkpoint_path, tmp_path / "model.safetensors")
        to_hugging_face(trained.output.checkpoint_path, tmp_path / "hf")
    finally:
        os.umask(before)
    files = [tmp_path / "model.safetensors", *(tmp_path / "hf").iterdir()]
    assert {path.name: path.stat().st_mode & 0o777 for path in files} == {path.name: mode for path in files}


def test_the_hugging_face_form_gives_the_same_logits_by_their_formulas(trained, tmp_path):
    to_hugging_face(trained.output.checkpoint_path, tmp_path / "hf")
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["config.json", "model.safetensors"]
    np.testing.assert_allclose(hugging_face_logits(tmp_path / "hf", TOKENS), own_logits(trained), atol=2e-5)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["architectures"], config["max_position_embeddings"]) == (["LlamaForCausalLM"], 8)


def test_a_large_model_is_several_files_with_an_index(trained, tmp_path):
    to_hugging_face(trained.output.checkpoint_path, tmp_path / "hf", max_file_bytes=40_000)
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert {name: file for file in files for name in load_file(tmp_path / "hf" / file)} == index["weight_map"]
    np.testing.assert_allclose(hugging_face_logits(tmp_path / "hf", TOKENS), own_logits(trained), atol=2e-5)


def size_of(path):
    return sum(file.stat().st_size for file in path.iterdir())


def test_several_hosts_write_a_folder_together_and_it_is_there_when_the_last_is_done(trained, tmp_path):
    checkpoint, alone, out = trained.output.checkpoint_path, tmp_path / "alone", tmp_path / "out"
    to_hugging_face(checkpoint, alone, max_file_bytes=40_000)
    together = partial(to_hugging_face, checkpoint, out, max_file_bytes=40_000, num_hosts=2)
    together(host=1)
    (work,) = tmp_path.glob("out.saving-*")
    names = sorted(path.name for path in alone.glob("*.safetensors"))
    assert sorted(path.name for path in work.iterdir()) == names[1::2]
    assert not out.exists()
    assert not weights.hugging_face.is_folder(work)
    # A host that was killed is called again: what is whole is not written again, what was cut off is.
    (work / names[1]).write_bytes(b"")
    before = (work / names[3]).stat().st_mtime_ns
    together(host=1)
    assert (work / names[3]).stat().st_mtime_ns == before
    together(host=0)
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]
    for path in alone.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    assert size_of(out) == size_of(alone)
    # One file is the share of one host: the other has nothing to do, however late it is.
    for host in (0, 1):
        to_hugging_face(checkpoint, tmp_path / "small", num_hosts=2, host=host)
    assert [path.name for path in tmp_path.glob("small*")] == ["small"]


@pytest.mark.slow("trains, and reads what was exported")
def test_one_parameter_is_read_at_a_time(trained, tmp_path, monkeypatch):
    """However many files they are in; each is read once."""
    alive, most, read = weakref.WeakSet(), [], []
    original = ArrayFiles.read_one

    class Watched(np.ndarray):
        """NumPy's own arrays are not hashable."""

        __hash__ = object.__hash__

    def watched(self, folder, key):
        gc.collect()
        most.append(len(alive))
        read.append(key)
        array = original(self, folder, key).view(Watched)
        alive.add(array)
        return array

    monkeypatch.setattr(ArrayFiles, "read_one", watched)
    to_hugging_face(trained.output.checkpoint_path, tmp_path / "hf", max_file_bytes=10_000)
    assert len(read) == len(set(read)) == len(jax.tree.leaves(trained.output.state.params))
    assert max(most) == 0


@pytest.mark.parametrize(("text", "num_bytes"), [("5GB", 5 * 10**9), ("500 mb", 500 * 10**6), ("1.5K", 1500), ("7", 7)])
def test_sizes_of_files_are_given_with_their_units(text, num_bytes):
    assert command.size(text) == num_bytes


def test_the_size_of_the_files_is_an_option(trained, tmp_path, capsys):
    given = [str(run_folder(trained)), str(tmp_path / "hf"), "--max-shard-size", "40KB"]
    assert command.main([*given, "--format", "huggingface"]) == 0
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    assert command.main(given) == 2
    assert "--max-shard-size: safetensors is one file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main([*given[:-1], "0GB"])
    assert "invalid size value: '0GB'" in capsys.readouterr().err


class WithTokenizer(BaseTrainer):
    def build_model_assets(self):
        return {"tokenizer": Tokenizer(["a"]), "note": "text"}


@pytest.mark.slow("trains and exports")
def test_the_assets_of_the_model_go_with_every_export(tmp_path, events):
    callback = HuggingFaceExport(str(tmp_path / "callback"))
    made = trainer(tmp_path, callback, cls=WithTokenizer, **LLAMA)
    made.train()
    files = ["config.json", "model.safetensors", "note", "vocab.json"]
    assert sorted(path.name for path in (tmp_path / "callback" / "2").iterdir()) == files
    for number, source in enumerate((run_folder(made), made.save_pretrained(str(tmp_path / "saved")))):
        out = tmp_path / f"out-{number}"
        assert command.main([str(source), str(out), "--format", "huggingface"]) == 0
        assert sorted(path.name for path in out.iterdir()) == files
        assert command.main([str(source), str(tmp_path / f"{number}.safetensors")]) == 0
        beside = tmp_path / f"{number}.assets"
        assert sorted(path.name for path in beside.iterdir()) == ["assets.json", "note", "tokenizer"]
        assert (beside / "note").read_text() == "text"


def test_the_command_leaves_accelerators_alone_however_it_is_called(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    assert command.main(["nowhere", "out"]) == 2
    assert os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.slow("starts a process")
def test_from_the_command_line_without_the_devices_of_the_training(trained, tmp_path):
    words = [sys.executable, "-m", "trainers.export", str(run_folder(trained)), str(tmp_path / "hf"), "--format", "huggingface"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'hf'}: huggingface of {trained.output.checkpoint_path}\n"
    np.testing.assert_allclose(hugging_face_logits(tmp_path / "hf", TOKENS), own_logits(trained), atol=2e-5)


def test_damage_is_named_and_nothing_is_written(trained, tmp_path, capsys):
    copy = tmp_path / "copy"
    trained.save_pretrained(str(copy))
    victim = max((path for path in (copy / "state").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    assert command.main([str(copy), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"{copy} cannot be exported: the contents of {victim.relative_to(copy)} are not those that were saved" in error
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exported_is_said(trained, tmp_path):
    with pytest.raises(CheckpointError, match="exists already: give a new name"):
        to_safetensors(trained.output.checkpoint_path, tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="has no complete checkpoint yet"):
        weights.find(str(tmp_path / "run"))


def test_another_model_than_a_decoder_is_refused(tmp_path):
    made = trainer(tmp_path, max_num_steps=1)
    made.train()
    with pytest.raises(UsageError, match=r"the model has the parameters embed, out: expected those of a model"):
        to_hugging_face(made.output.checkpoint_path, tmp_path / "hf")


@pytest.mark.slow("trains, and reads what was exported")
def test_a_callback_exports_on_the_way_and_at_the_end(tmp_path, events):
    (tmp_path / "hf" / "5").mkdir(parents=True)  # of an earlier life
    made = trainer(tmp_path, HuggingFaceExport(str(tmp_path / "hf"), every_steps=2), **{**LLAMA, "max_num_steps": 5})
    made.train()
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["2", "4", "5"]
    np.testing.assert_allclose(hugging_face_logits(tmp_path / "hf" / "5", TOKENS), own_logits(made), atol=2e-5)
    assert of(events, "note") == []


@pytest.mark.slow("trains, and reads what was exported")
def test_no_checkpoint_is_deleted_before_its_export_is_made(tmp_path, events, monkeypatch):
    """However long the export takes, and however few checkpoints are to stay."""
    trained, exported, export_now = threading.Event(), [], hugging_face.to_hugging_face

    def late(path, out, *, replace):
        assert trained.wait(PATIENCE_S)
        export_now(path, out, replace=replace)
        exported.append(Path(path).name.partition("-")[0])

    class Last(Callback):
        def on_train_end(self, state, **kwargs):
            trained.set()

    monkeypatch.setattr(hugging_face, "to_hugging_face", late)
    settings = {**LLAMA, "max_num_steps": 8, "checkpoint": {"save_steps": 1, "save_total_limit": 1}}
    made = trainer(tmp_path, Last(), HuggingFaceExport(str(tmp_path / "hf"), every_steps=2), **settings)
    made.train()
    assert (exported, of(events, "note")) == (["2", "4", "6", "8"], [])
    assert [path.name.partition("-")[0] for path in (run_folder(made) / "checkpoints").iterdir()] == ["8"]


def test_an_export_that_fails_is_reported_and_ends_nothing(tmp_path, events):
    made = trainer(tmp_path, HuggingFaceExport(str(tmp_path / "hf")), max_num_steps=2)
    made.train()
    notes = [event["message"] for event in of(events, "note")]
    assert any(note.startswith("no export of step 2 for Hugging Face: UsageError: the model has") for note in notes), notes


def test_a_callback_of_all_hosts_writes_its_share_and_host_0_waits_for_the_others(trained, tmp_path, events, monkeypatch):
    """Host 1 is a thread here, which writes its part late, and then cannot."""
    checkpoint, out = trained.output.checkpoint_path, tmp_path / "hf" / "2"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    callback = HuggingFaceExport(str(tmp_path / "hf"), all_hosts=True)
    callback._last = (2, checkpoint)
    waited = threading.Event()
    monkeypatch.setattr(hugging_face.time, "sleep", lambda seconds: waited.set())

    in_parts = partial(to_hugging_face, max_file_bytes=40_000)
    monkeypatch.setattr(hugging_face, "to_hugging_face", in_parts)

    def late():
        assert waited.wait(PATIENCE_S)
        in_parts(checkpoint, out, replace=True, host=1, num_hosts=2)

    other = threading.Thread(target=late)
    other.start()
    callback.on_train_end(None)
    other.join()
    np.testing.assert_allclose(hugging_face_logits(out, TOKENS), own_logits(trained), atol=2e-5)
    assert of(events, "note") == []

    monkeypatch.setattr(hugging_face.time, "sleep", lambda seconds: (on_its_way() / "failed").touch())

    def on_its_way():
        return next((tmp_path / "hf").glob("2.saving-*"))

    callback = HuggingFaceExport(str(tmp_path / "hf"), all_hosts=True)
    callback._start(2, checkpoint)
    callback.on_train_end(None)
    assert "another host did not write its part" in of(events, "note")[-1]["message"]
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["2"]


def test_an_earlier_export_is_replaced_and_a_users_folder_of_that_name_is_not(trained, tmp_path):
    write = partial(to_hugging_face, trained.output.checkpoint_path, replace=True)
    write(tmp_path / "hf")
    (tmp_path / "hf" / "old").touch()
    write(tmp_path / "hf")
    assert not (tmp_path / "hf" / "old").exists()
    (tmp_path / "100").mkdir()
    (tmp_path / "100" / "thesis.tex").touch()
    with pytest.raises(ours.NotOursError, match="it is not an export that Gangway wrote"):
        write(tmp_path / "100")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["100", "hf"]
    assert [path.name for path in (tmp_path / "100").iterdir()] == ["thesis.tex"]

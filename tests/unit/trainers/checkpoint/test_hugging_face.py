"""A folder of Hugging Face as a beginning: each part where it belongs, what does not fit, damage, a model that is trained on."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gangway.errors import CheckpointError
from gangway.storage.opening import place_of
from tests import ROOT
from tests.programs.small_tokens import datasets
from tests.unit.hf_folders import nested, parameters_of
from tests.unit.training import arguments, assert_equal, of
from trainers.base import BaseTrainer
from trainers.checkpoint import hugging_face, hugging_face_out, tensor_files, weights
from trainers.config import InitConfig, MeshConfig, ModelConfig
from trainers.parallel import mesh as meshes

PARITY = ROOT / "tests" / "unit" / "data" / "parity"
MESH = {"data": 2, "fsdp": 2, "tensor": 2}
SETTINGS = {
    "task": "trainers.tasks.causal_lm:CausalLMTask",
    "mesh": MESH,
    "max_num_steps": 1,
    "optimizer": {"learning_rate": 1e-30},
    "previews": {"prompts": []},
    "evaluation": {"max_batches": 1},
}


def trainer(path, **changes):
    made = arguments(path, **SETTINGS, **changes)
    return BaseTrainer(made, *datasets(made))


def shardings(parameters, axes=("fsdp", "tensor")):
    """The last two dimensions are shared out where they can be."""
    mesh = meshes.make_mesh(MeshConfig(**MESH))

    def of_shape(shape):
        names = [*[None] * (len(shape) - 2), *axes][-len(shape) :]
        shared = [name if name and size % mesh.shape[name] == 0 else None for name, size in zip(names, shape, strict=True)]
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*shared))

    return {name: of_shape(stored.shape) for name, stored in parameters.items()}


def changed(tmp_path, change):
    """A copy of a folder whose tensors were changed."""
    folder = tmp_path / "model"
    shutil.copytree(PARITY / "llama3", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("folder", sorted(PARITY.iterdir()), ids=lambda folder: folder.name)
@pytest.mark.parametrize("axes", [("fsdp", "tensor"), ("tensor", "fsdp")])
def test_every_device_gets_its_part_of_each_family(folder, axes):
    found = weights.open_model(weights.find(str(folder)))
    expected = parameters_of(folder)
    assert found.parameters.keys() == expected.keys()
    arrays = weights.read(found, {name: name for name in expected}, shardings(found.parameters, axes))
    assert any(not array.is_fully_replicated for array in arrays.values())
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def test_the_parts_are_read_and_not_the_whole(monkeypatch):
    found, read = weights.open_model(place_of(PARITY / "llama3")), []
    original = tensor_files.read

    def watched(*given):
        read.append(original(*given))
        return read[-1]

    monkeypatch.setattr(tensor_files, "read", watched)
    weights.read(found, {"layers.up": "layers.up"}, shardings({"layers.up": found.parameters["layers.up"]}))
    # Each of the 4 parts once, though 8 devices have them; of each of the 2 layers.
    _, rows, columns = found.parameters["layers.up"].shape
    assert {part.shape for part in read} == {(columns // 2, rows // 2)}
    assert len(read) == 8


def test_several_files_with_an_index_are_one_model(tmp_path):
    folder = changed(tmp_path, lambda tensors: None)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = weights.open_model(weights.find(str(folder)))
    arrays = weights.read(found, {name: name for name in found.parameters}, shardings(found.parameters))
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, parameters_of(PARITY / "llama3")[name])


def in_two_files(tmp_path, index, twice=("model.norm.weight",), **others):
    """A folder of two files, which both have the tensors `twice`: in the second one they are larger by one."""
    folder = changed(tmp_path, lambda tensors: None)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    files = {"a.safetensors": {name: tensors[name] for name in names[::2]}, "b.safetensors": {}}
    files["b.safetensors"] = {name: tensors[name] for name in names[1::2]}
    files["a.safetensors"] |= {name: tensors[name] for name in twice}
    files["b.safetensors"] |= {name: tensors[name] + 1 for name in twice}
    for file, part in files.items():
        save_file(part, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    weight_map = {name: file for name, file in (weight_map | index).items() if file is not None}
    (folder / hugging_face.INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder, tensors


def norm_of(folder):
    found = hugging_face.look(place_of(folder))
    (name,) = (name for name, leaf in found.leaves.items() if leaf.tensors == ("model.norm.weight",))
    return hugging_face.read_whole(found, name)


@pytest.mark.parametrize(("file", "more"), [("a.safetensors", 0), ("b.safetensors", 1)])
def test_of_a_tensor_that_two_files_have_the_one_that_the_index_names_counts(tmp_path, file, more):
    folder, tensors = in_two_files(tmp_path, {"model.norm.weight": file})
    np.testing.assert_array_equal(norm_of(folder), tensors["model.norm.weight"] + more)


def test_one_file_counts_more_than_an_index_as_in_transformers(tmp_path):
    folder, tensors = in_two_files(tmp_path, {"model.norm.weight": "b.safetensors"})
    (folder / "one.safetensors").rename(folder / "model.safetensors")
    np.testing.assert_array_equal(norm_of(folder), tensors["model.norm.weight"])
    transformers = pytest.importorskip("transformers")
    path = transformers.utils.hub.get_checkpoint_shard_files(folder, folder / hugging_face.INDEX_FILE)[0]
    assert [Path(each).name for each in path] == ["a.safetensors", "b.safetensors"]  # what it would read without the one file


def test_an_index_that_does_not_fit_its_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"index.json does not fit its files: model.norm.weight is in a.* and in b.*safe"):
        hugging_face.look(place_of(in_two_files(tmp_path / "1", {"model.norm.weight": None})[0]))
    wrong = {"model.layers.0.mlp.up_proj.weight": "a.safetensors", "model.layers.1.mlp.up_proj.weight": "a.safetensors"}
    folder, _ = in_two_files(tmp_path / "2", {})
    headers = {name: {*load_file(folder / f"{name}.safetensors")} for name in "ab"}
    elsewhere = next(name for name in wrong if name not in headers["a"])
    with pytest.raises(CheckpointError, match=rf"does not fit its files: {elsewhere} is not in a\.safetensors"):
        hugging_face.look(place_of(in_two_files(tmp_path / "3", wrong)[0]))
    with pytest.raises(CheckpointError, match=r"names c\.safetensors, which .* has not: copy the whole folder"):
        hugging_face.look(place_of(in_two_files(tmp_path / "4", {"model.norm.weight": "c.safetensors"})[0]))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", r"model\.safetensors\.index\.json is no index of safetensors"),
        ("[]", r"model\.safetensors\.index\.json is no index of safetensors"),
        ('{"weight_map": {}}', "expected a weight_map with the file of each tensor"),
        ('{"weight_map": {"a": 1}}', "expected a weight_map with the file of each tensor"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "a is there twice"),
    ],
)
def test_a_file_that_is_no_index(tmp_path, index, message):
    folder, _ = in_two_files(tmp_path, {})
    (folder / hugging_face.INDEX_FILE).write_text(index)
    with pytest.raises(
        CheckpointError, match=rf"model\.safetensors\.index\.json is no index of safetensors: .*{message}|{message}"
    ):
        hugging_face.look(place_of(folder))


def test_tensors_that_do_not_fit_are_all_named(tmp_path):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.mlp.up_proj.bias"] = np.zeros(48, np.float32)
        tensors["model.layers.1.input_layernorm.weight"] = np.ones(5, np.float32)

    with pytest.raises(CheckpointError) as raised:
        weights.open_model(place_of(changed(tmp_path, change)))
    for text in (
        "model.layers.1.mlp.up_proj.weight is missing",
        "model.layers.0.mlp.up_proj.bias is left over",
        "model.layers.1.input_layernorm.weight is F32[5]: expected F32[32]",
        "of the family llama, which its config.json says",
    ):
        assert text in str(raised.value)


def test_old_files_have_frequencies_besides(tmp_path):
    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)

    assert "layers.up" in weights.open_model(place_of(changed(tmp_path, change))).parameters


def with_a_head(tmp_path, change):
    """A folder whose configuration ties the table of the logits, and whose file has one besides."""
    folder = tmp_path / "model"
    shutil.copytree(PARITY / "gemma", folder)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors | {"lm_head.weight": change(head)}, folder / "model.safetensors")
    return folder


def last_row_changed(head):
    head[-1, -1] += 1
    return head


def test_a_tied_table_may_be_there_twice_if_both_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(hugging_face, "COMPARED_BYTES", 1024)  # several parts
    assert "unembed" not in weights.open_model(place_of(with_a_head(tmp_path, lambda head: head))).parameters


@pytest.mark.parametrize("change", [last_row_changed, lambda head: head[:-1], lambda head: head.astype(np.float16)])
def test_another_table_than_the_one_that_it_is_tied_to_is_refused(tmp_path, change):
    folder = with_a_head(tmp_path, change)
    said = r"model: lm_head\.weight is not model\.embed_tokens\.weight, and config\.json says .* one \(tie_word_embeddings\)"
    with pytest.raises(CheckpointError, match=said):
        weights.open_model(place_of(folder))


def test_a_cut_file_is_named(tmp_path):
    folder = changed(tmp_path, lambda tensors: None)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no whole file of safetensors"):
        weights.open_model(place_of(folder))


def test_another_model_is_reported_by_its_shapes():
    found = weights.open_model(place_of(PARITY / "llama3"))
    other = {name: (*stored.shape[:-1], 7) for name, stored in found.parameters.items()}
    with pytest.raises(CheckpointError, match=r"embed is \[64, 32\] there and \[64, 7\] here"):
        weights.match(found, other, InitConfig(path="x"))


def test_other_weights_have_another_digest(tmp_path):
    def change(tensors):
        tensors["model.norm.weight"][0] += 1

    llama = weights.open_model(place_of(PARITY / "llama3")).digest()
    assert weights.open_model(place_of(changed(tmp_path, change))).digest() != llama
    assert llama == weights.open_model(place_of(PARITY / "llama3")).digest()


@pytest.mark.parametrize("name", ["llama3_1", "gemma3", "gpt2"])
@pytest.mark.slow("reads, writes and runs whole models")
def test_a_pretrained_model_is_the_one_of_the_folder(tmp_path, events, name):
    made = trainer(tmp_path, model={"pretrained": str(PARITY / name)})
    made.train()
    config = made.arguments.model
    assert (config.vocab_size, config.pretrained) == (64, None)
    assert_equal(made.output.state.params, nested(parameters_of(PARITY / name)))
    notes = [event["message"] for event in of(events, "note")]
    assert any(f"parameters are those of {PARITY / name}" in note for note in notes), notes


@pytest.mark.parametrize("name", ["phi3", "gpt2", "mixtral"])
def test_the_tensors_that_are_planned_have_the_bytes_of_the_folder(name):
    """Of weights that lie side by side in one matrix, or turned, or one for each expert."""
    expected, parameters = load_file(PARITY / name / "model.safetensors"), parameters_of(PARITY / name)
    shapes = {ours: (value.shape, str(value.dtype)) for ours, value in parameters.items()}
    planned = hugging_face_out.plan(hugging_face.read_config(place_of(PARITY / name)), shapes)
    assert {tensor.name for tensor in planned} == expected.keys()
    for tensor in planned:
        assert tensor.shape == expected[tensor.name].shape
        found = tensor.value([parameters[ours] for ours in tensor.parameters])
        np.testing.assert_array_equal(found, expected[tensor.name], err_msg=tensor.name)


def test_a_matrix_of_another_size_than_what_lies_in_it_is_named(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(PARITY / "phi3", folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.{}.self_attn.qkv_proj.weight"
    save_file(
        tensors | {name.format(layer): tensors[name.format(layer)][:-1] for layer in range(2)}, folder / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"0\.self_attn\.qkv_proj\.weight is F32\[63, 32\]: expected 64 for all that lies"):
        hugging_face.look(place_of(folder))


@pytest.mark.parametrize(("name", "max_bytes"), [("qwen3", 1 << 30), ("gpt2", 20_000)])
@pytest.mark.slow("reads, writes and runs whole models")
def test_import_export_and_import_change_no_bit(tmp_path, name, max_bytes):
    from trainers.export import to_hugging_face

    made = trainer(tmp_path, model={"pretrained": str(PARITY / name)})
    made.train()
    out = tmp_path / "out"
    to_hugging_face(made.output.checkpoint_path, out, max_file_bytes=max_bytes)
    files = sorted(out.glob("*.safetensors"))
    assert (len(files) > 3) == (name == "gpt2")
    expected = load_file(PARITY / name / "model.safetensors")
    found = {tensor: value for file in files for tensor, value in load_file(file).items()}
    assert found.keys() == expected.keys()
    for tensor, value in found.items():
        np.testing.assert_array_equal(value, expected[tensor])
    # As it was, with names that no setting of ours has.
    assert json.loads((out / "config.json").read_text()) == json.loads((PARITY / name / "config.json").read_text())
    again = weights.open_model(weights.find(str(out)))
    arrays = weights.read(again, {leaf: leaf for leaf in again.parameters}, shardings(again.parameters))
    assert_equal(parameters_of(PARITY / name), arrays)


def test_a_parameter_is_in_memory_once_while_it_is_read(monkeypatch):
    """A list of the tensors of all layers would be the parameter once more."""
    found, alive, most = weights.open_model(place_of(PARITY / "llama3")), weakref.WeakSet(), []
    original = tensor_files.read

    class Part(np.ndarray):
        __hash__ = object.__hash__

    def watched(*given):
        most.append(len(alive))
        part = original(*given).view(Part)
        alive.add(part)
        return part

    monkeypatch.setattr(tensor_files, "read", watched)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    weights.read(found, {"layers.up": "layers.up"}, {"layers.up": one})
    # Not more than the one that is being replaced, whatever the number of layers.
    assert len(most) == found.parameters["layers.up"].shape[0] == 2
    assert len(alive) <= 1


def test_what_the_folder_says_is_not_said_again():
    with pytest.raises(ValueError, match="width = 64: the folder of pretrained says it; leave it out"):
        ModelConfig(pretrained="x", width=64)
    assert ModelConfig(pretrained="x", remat="full").remat == "full"


def test_the_parameters_of_another_model_are_not_written_as_this_one():
    config = ModelConfig(vocab_size=64, width=32)
    with pytest.raises(Exception, match="expected those of a model of the family llama"):
        hugging_face_out.plan(config, {"embed": ((64, 32), "float32")})

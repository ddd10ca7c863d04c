"""Models and states that lie in a bucket: found, read by the parts that are needed, exported; and an outage is not absence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gangway.errors import CheckpointError, CheckpointMissingError, CheckpointUnavailableError, UsageError
from gangway.storage import opening
from gangway.storage.object_store import Limits
from gangway.storage.opening import place_of
from gangway.storage.store import StorageUnavailable
from tests import ROOT
from tests.programs import checkpointing
from tests.stores.fault_proxy import Fault
from trainers.checkpoint import carried, export, hugging_face, layout, model_files, tensor_files, weights
from trainers.checkpoint.export import from_safetensors, to_safetensors
from trainers.checkpoint.standalone import load_from
from trainers.commands import generate, saved_models
from trainers.config import FrozenConfig, InitConfig, LoraConfig
from trainers.loop import start_from
from trainers.planning.estimate import seen_from_here
from trainers.step.state import arrays_of_model

LLAMA = ROOT / "tests" / "unit" / "data" / "parity" / "llama3"
META = {"arguments": {"optimizer": {"name": "adamw"}, "lora": None}}


@pytest.fixture
def bucket(stores, monkeypatch):
    stores["gs"].set(monkeypatch)
    monkeypatch.setattr(opening, "LIMITS", Limits(request_s=5.0, patience_s=0.3, first_wait_s=0.01, longest_wait_s=0.1))
    layout._rows.clear()
    return stores["gs"]


@pytest.fixture(scope="module")
def run(stores):
    """The URL of a run with checkpoints of steps 4 and 8, and the state of step 8."""
    with pytest.MonkeyPatch.context() as patch:
        stores["gs"].set(patch)
        url = f"{stores['gs'].url()}/run"
        manager = checkpointing.manager(f"{url}/checkpoints")
        states = [manager.save_now(step, **META) for step in (4, 8)]
        yield url, states[1]
        layout._rows.clear()


def put(folder: Path, url: str) -> str:
    for path in (path for path in folder.rglob("*") if path.is_file()):
        place = place_of(url) / path.relative_to(folder).as_posix()
        place.store.upload(place.key, path)
    return url


@pytest.fixture
def llama(bucket):
    return put(LLAMA, f"{bucket.url()}/llama")


def numbers(found, name):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return np.asarray(weights.read(found, {name: name}, {name: one})[name])


# ---------------------------------------------------------------- runs and checkpoints


def test_a_run_stands_for_its_newest_checkpoint_and_its_arrays_are_read_there(bucket, run):
    url, state = run
    found = weights.open_model(weights.find(url))
    assert found.path.name.startswith("8-")
    np.testing.assert_array_equal(numbers(found, "embed"), np.asarray(state.params["embed"]))
    arrays = weights.load(found, arrays_of_model(checkpointing.abstract(state).params, {}))
    assert found.meta["batch_index"] == 8
    np.testing.assert_array_equal(arrays["half"], state.params["half"])


def test_a_step_stands_for_what_was_committed_of_it(bucket, run):
    url, _ = run
    assert weights.find(f"{url}/checkpoints/4").name.startswith("4-")
    assert start_from.found(f"{url}/4")[0].name.startswith("4-")
    path, meta = start_from.found(url)
    assert (path.name.partition("-")[0], meta["step"]) == ("8", 8)
    with pytest.raises(CheckpointMissingError, match="there is no"):
        start_from.found(f"{url}/5")


def test_a_whole_state_is_loaded(bucket, run):
    url, state = run
    path, _ = start_from.found(url)
    loaded, _ = load_from(str(path), checkpointing.abstract(state))
    assert checkpointing.same(loaded, state)


@pytest.mark.parametrize("match", ["^LIST .*row", "^GET .*row", "^GET .*8-.*manifest", "^LIST .*8-"])
@pytest.mark.parametrize("do", ["503", "403"])
def test_an_outage_lets_no_older_one_win_and_is_not_absence(bucket, run, match, do):
    bucket.proxy.faults[:] = [Fault(match, do)]
    with pytest.raises(CheckpointUnavailableError) as error:
        weights.open_model(weights.find(run[0]))
    assert not isinstance(error.value, CheckpointMissingError)


def test_an_outage_while_a_state_is_read_is_no_damage(bucket, run):
    url, state = run
    path, _ = start_from.found(url)
    bucket.proxy.faults[:] = [Fault("^GET .*state", "403")]
    with pytest.raises(CheckpointUnavailableError, match="cannot be read"):
        load_from(str(path), checkpointing.abstract(state))


def test_a_damaged_one_is_named_and_a_run_stands_for_its_newest_whole_one(bucket, run):
    there, url = place_of(run[0]), f"{bucket.url()}/copy"
    for entry in there.list():
        (place_of(url) / entry.name).put((there / entry.name).get())
    path = weights.find(url)
    (path / "meta.json").put(b"{}")
    with pytest.raises(CheckpointUnavailableError, match=r"8-.* is not whole: meta\.json"):
        weights.open_model(path)
    assert weights.find(url).name.startswith("4-")


@pytest.mark.parametrize("url", ["gcs://b/x", "s3://b/x?y=1", "az://b/x", "gs:///x"])
def test_what_is_no_url_of_a_bucket_is_refused_with_the_settings(url):
    for make in (lambda: InitConfig(path=url), lambda: FrozenConfig(path=url), lambda: LoraConfig(base=url)):
        with pytest.raises(ValueError, match=r"expected a folder or file, local or mounted, or s3://BUCKET/NAME"):
            make()


def test_what_a_bucket_has_not_or_does_not_tell_is_an_error_before_a_machine_is_taken(bucket):
    doubts: list[str] = []

    def seen(url):
        seen_from_here("init_from", url, lambda: weights.open_model(weights.find(url)), doubts)

    with pytest.raises(UsageError, match=r"init_from: there is no gs://.*/nowhere"):
        seen(f"{bucket.url()}/nowhere")
    bucket.proxy.faults[:] = [Fault(".*", "403")]
    with pytest.raises(
        UsageError, match=r"init_from: gs://.* cannot be read: access is refused .*GOOGLE_APPLICATION_CREDENTIALS"
    ):
        seen(f"{bucket.url()}/run")
    bucket.proxy.faults[:] = [Fault(".*", "503")]
    with pytest.raises(UsageError, match=r"init_from: gs://.* cannot be read: .*503"):
        seen(f"{bucket.url()}/run")
    assert doubts == []


# ---------------------------------------------------------------- files of safetensors, and folders of Hugging Face


def test_a_folder_of_hugging_face_is_read_as_on_a_disk(llama):
    there, here = weights.open_model(weights.find(llama)), weights.open_model(weights.find(str(LLAMA)))
    assert there.parameters == here.parameters
    assert there.digest() == here.digest()
    for name in here.parameters:
        np.testing.assert_array_equal(numbers(there, name), numbers(here, name), err_msg=name)


def test_of_a_tensor_the_rows_are_read_that_are_asked_for(bucket, tmp_path):
    whole = np.arange(4096 * 8, dtype=np.float32).reshape(4096, 8)
    save_file({"a": whole, "b": np.array(3.5, np.float16)}, tmp_path / "m.safetensors")
    put(tmp_path, url := bucket.url())
    place = place_of(url) / "m.safetensors"
    tensor_files.head(place)
    bucket.proxy.counted()
    np.testing.assert_array_equal(tensor_files.read(place, "a", (slice(8, 16), slice(2, 4))), whole[8:16, 2:4])
    assert bucket.proxy.counted()["GET bytes in"] == 8 * 8 * 4
    assert tensor_files.read(place, "b") == np.float16(3.5)
    assert tensor_files.read(place, "a", (slice(5, 5), slice(None))).shape == (0, 8)


@pytest.mark.parametrize("size", [3, 100, -4])
def test_a_file_that_is_cut_is_named(llama, size):
    place = place_of(llama) / "model.safetensors"
    place.put(place.get()[:size])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no whole file of safetensors"):
        weights.open_model(weights.find(llama))


def test_a_file_that_is_replaced_by_a_shorter_one_meanwhile_is_not_taken(llama):
    place = place_of(llama) / "model.safetensors"
    offsets = tensor_files.head(place).offsets
    place.put(place.get()[:-64])
    with pytest.raises(StorageUnavailable, match=r"the object was replaced while it was read"):
        tensor_files.read(place, max(offsets, key=offsets.__getitem__))


def test_an_outage_is_not_a_folder_without_weights(bucket, llama):
    for match in ("config.json", "model.safetensors"):
        bucket.proxy.faults[:] = [Fault(match, "503")]
        with pytest.raises(CheckpointUnavailableError) as error:
            weights.open_model(weights.find(llama))
        assert not isinstance(error.value, CheckpointMissingError)


def test_the_files_beside_the_weights_are_copied_and_deleted_at_the_end(bucket, llama, monkeypatch):
    ends = []
    monkeypatch.setattr(model_files.atexit, "register", ends.append)
    (place_of(llama) / "tokenizer.json").put(b"{}")
    found = saved_models.look(llama)
    folder = saved_models.files_of(found)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "tokenizer.json"]
    [end] = ends
    end()
    assert not folder.exists()
    monkeypatch.setattr(model_files, "MAX_COPIED_BYTES", 10)
    with pytest.raises(CheckpointError, match="expected at most 10; copy the folder to this machine"):
        saved_models.files_of(found)


def test_a_model_in_a_bucket_generates_what_it_does_on_a_disk(bucket, tmp_path, capsys):
    folder, texts = tmp_path / "model", []
    shutil.copytree(LLAMA, folder)
    words = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "normalizer": None}
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2}, "unk_token": "?"}
    (folder / "tokenizer.json").write_text(json.dumps({**words, "post_processor": None, "decoder": None, "model": model}))
    for source in (put(folder, f"{bucket.url()}/model"), str(folder)):
        assert generate.main([source, "--prompt", "a b", "--max-new-tokens", "4", "--dtype", "float32", "--json"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


# ---------------------------------------------------------------- exports


def write_folder(local: Path) -> None:
    shutil.copytree(LLAMA, local)


def test_an_export_is_put_with_what_makes_it_whole_at_the_end(bucket):
    url = f"{bucket.url()}/out"
    bucket.proxy.log.clear()
    export.to_bucket(url, write_folder)
    puts = [line for line in bucket.proxy.log if line.startswith("PUT")]
    assert "config.json" in puts[-1]
    assert hugging_face.is_folder(place_of(url))
    with pytest.raises(CheckpointError, match="exists already: give a new name"):
        export.to_bucket(url, write_folder)


def test_an_export_that_fails_leaves_nothing(bucket):
    url = f"{bucket.url()}/out"
    bucket.proxy.faults[:] = [Fault("^PUT .*config.json", "403")]
    with pytest.raises(CheckpointUnavailableError, match="access is refused"):
        export.to_bucket(url, write_folder)
    bucket.proxy.faults.clear()
    assert place_of(url).list() == []


def test_a_file_is_put_after_its_assets(bucket):
    url = f"{bucket.url()}/model.safetensors"

    def write(local: Path) -> None:
        save_file({"a": np.ones(3)}, local)
        local.with_suffix(".assets").mkdir()
        (local.with_suffix(".assets") / "assets.json").write_text("{}")

    bucket.proxy.log.clear()
    export.to_bucket(url, write)
    puts = [line for line in bucket.proxy.log if line.startswith("PUT")]
    assert "model.assets/assets.json" in puts[0]
    assert "model.safetensors" in puts[1]
    assert from_safetensors(url)["a"].tolist() == [1, 1, 1]


def test_a_checkpoint_is_exported_with_the_assets_of_its_run(bucket, run, tmp_path):
    url, state = run
    assets = place_of(url) / "assets"
    (assets / "assets.json").put(b'{"assets": {"hugging_face": "folder"}, "format": 1}')
    (assets / "hugging_face" / "tokenizer.json").put(b"{}")
    path = weights.find(url)
    assert sorted(each.name for each in carried.folder_of(path).iterdir()) == ["tokenizer.json"]
    to_safetensors(path, tmp_path / "m.safetensors")
    assert (tmp_path / "m.assets" / "hugging_face" / "tokenizer.json").is_file()
    np.testing.assert_array_equal(load_file(tmp_path / "m.safetensors")["embed"], np.asarray(state.params["embed"]))

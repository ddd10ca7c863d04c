"""A model in the files of other programs, on a disk or in a bucket: one file of safetensors, or a folder of Hugging Face, of PEFT
or of MLflow."""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gangway.errors import CheckpointError, UsageError
from gangway.storage import ours
from gangway.storage.opening import place_of
from gangway.storage.store import Place
from trainers.checkpoint import assets, layout, manifest, mlflow_model
from trainers.config import LoraConfig, ModelConfig, VisionConfig
from trainers.config.arguments import from_dict
from trainers.config.frozen import BASE
from trainers.config.hf_files import ADAPTER_FILE, CONFIG_FILE, GENERATION_FILE, LABELS_FILE, PREPROCESSOR_FILE, TEMPLATE_FILE
from trainers.models.hf import text_part
from trainers.models.hf import vision_config as hf_config
from trainers.models.hf.vision_config import Config, ImageTextConfig

if TYPE_CHECKING:  # transformers takes a second
    from trainers.text.tokenizers import Tokenizer

MAX_FILE_BYTES = 5 * 10**9
"""The largest size of one file in the Hugging Face format: a larger model gets several files, with an index."""

Tensors = Mapping[str, np.ndarray]


def to_safetensors(checkpoint: Place | str, out: Path | str, *, adapter: bool = False, base: str | None = None) -> None:
    """Writes the file `out`, atomically, and before it the model's assets to the folder beside it whose name ends in `.assets`.
    Of a run with LoRA it has the adapters merged with their base (`base`: where that is now), or with `adapter` the adapters
    alone. Raises CheckpointError if the checkpoint is damaged, or `out` exists."""
    from trainers.checkpoint import weights

    checkpoint = layout.named(checkpoint)
    found = weights.open_whole(checkpoint, base, alone=adapter)
    if adapter:
        _adapters(found.meta, checkpoint)
    about = {"batch_index": str(found.meta["batch_index"]), "arguments": json.dumps(found.meta["arguments"])}
    _check_new(Path(out))
    if folder := assets.folder_of(checkpoint):
        _write_atomically(Path(out).with_suffix(".assets"), lambda work: _copy_assets(folder, work))
    _write_atomically(Path(out), lambda work: _save_file(found.all_here(), work, about))


def to_mlflow(checkpoint: Place | str, out: Path | str, *, adapter: bool = False, base: str | None = None) -> None:
    """Writes the folder `out`, atomically, which `mlflow.pyfunc.load_model` loads where Gangway is installed: in it `model`, a
    folder of `to_hugging_face`; of a classifier, a file of `to_safetensors`. Raises CheckpointError if the checkpoint is damaged
    or `out` exists, and UsageError if nothing can be predicted with the model from a text."""
    if adapter:
        raise UsageError("--adapter: MLflow loads whole models; leave it out, or write --format huggingface")
    task = manifest.read_meta(layout.named(checkpoint))["arguments"]["task"]
    is_classifier = mlflow_model.predicts(task) == mlflow_model.LABELS

    def write(work: Path) -> None:
        data = work / mlflow_model.DATA
        work.mkdir()
        if is_classifier:
            to_safetensors(checkpoint, data / mlflow_model.CLASSIFIER_FILE, base=base)
        else:
            to_hugging_face(checkpoint, data, base=base)
        mlflow_model.write_about(work, is_classifier=is_classifier)

    _write_atomically(Path(out), write)


def _copy_assets(folder: Path, work: Path) -> None:
    from trainers.checkpoint import carried

    shutil.copytree(folder, work)
    carried.reset_tokenizer(work)


def from_safetensors(path: Path | Place | str) -> dict[str, Any]:
    """Returns the parameters in a file of `to_safetensors`, for `train(model_parameters=...)`."""
    from trainers.checkpoint import weights

    params = dict[str, Any]()
    for name, value in weights.open_model(place_of(path)).all_here().items():
        *folders, last = name.split(".")
        functools.reduce(lambda within, folder: within.setdefault(folder, {}), folders, params)[last] = value
    return params


def to_hugging_face(
    checkpoint: Place | str,
    out: Path | str,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    replace: bool = False,
    adapter: bool = False,
    base: str | None = None,
    host: int = 0,
    num_hosts: int = 1,
) -> None:
    """Writes the folder `out`, atomically; with `replace`, an existing one is replaced. Of a run with LoRA it has the adapters
    merged with their base (`base`: where that is now), or with `adapter` the adapters alone, in the form of PEFT.

    Several hosts that call this with their number write it together, to storage that all of them see: file i is written by host
    i mod `num_hosts`. They do not wait for each other: the folder is there when the last of them is done, or when all have been
    called again after a failure. Raises CheckpointError if the checkpoint is damaged or `out` exists, and UsageError if the
    model is of no family that `transformers` has."""
    from trainers.checkpoint import carried, hugging_face_out, weights

    checkpoint, out = layout.named(checkpoint), Path(out)
    if adapter:
        _to_peft(checkpoint, out, base, replace=replace)
        return
    found = weights.open_whole(checkpoint, base, host=host, num_hosts=num_hosts)
    meta, config = found.meta, _config_of(found.meta["arguments"])
    tensors = hugging_face_out.plan(config, {name: (stored.shape, stored.dtype) for name, stored in found.parameters.items()})
    about = hf_config.write(config, max_length=_context_of(checkpoint, meta), dtype=tensors[0].dtype)
    files = hugging_face_out.files_of(tensors, max_file_bytes)

    def write_others(work: Path) -> None:
        assets.copy_into(work, checkpoint)
        carried.reset_tokenizer(work)
        read = _tokenizer_of(work, meta)
        # After the assets: none of their files takes the place of the model's own.
        settings = (_original(work, config, about) or about | _ends(read, about)) | _class_names(work)
        if isinstance(config, ModelConfig):
            # It belongs to a model with images, of which this is the decoder.
            copied = work / PREPROCESSOR_FILE
            ours.delete(copied, ours.among("a copy that was just made", [copied]))
        (work / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n")
        _write_generation(work, read)
        hugging_face_out.write_index(work, files)

    def write(work: Path) -> None:
        work.mkdir()
        hugging_face_out.write(work, files, found.here)
        write_others(work)

    if num_hosts == 1:
        _write_atomically(out, write, replace=replace)
        return
    if host >= len(files):
        return  # it has no share
    if not replace:
        _check_new(out)
    work = on_the_way(checkpoint, out)
    work.mkdir(parents=True, exist_ok=True)
    hugging_face_out.write(work, files, found.here, lambda number: number % num_hosts == host)
    if all(hugging_face_out.is_whole(work, file) for file in files):
        _publish(work, out, write_others, replace=replace)


def _config_of(arguments: Mapping[str, Any]) -> Config:
    """Returns what the sections of a run's arguments say of its model."""
    if arguments.get("vision") is None:
        return from_dict(ModelConfig, arguments["model"])
    vision = from_dict(VisionConfig, arguments["vision"])
    # An encoder whose tokens no decoder reads is the whole model.
    return vision if vision.tokens_per_image is None else ImageTextConfig(vision, from_dict(ModelConfig, arguments["model"]))


def on_the_way(checkpoint: Place, out: Path) -> Path:
    """Returns the folder that several hosts write together: the same on all of them, for this checkpoint alone. It is there until
    all files of weights are."""
    return out.with_name(f"{out.name}.saving-{manifest.digest(checkpoint / manifest.MANIFEST_FILE).sha256[:8]}")


def _publish(work: Path, out: Path, write_others: Callable[[Path], None], *, replace: bool) -> None:
    """Gives a folder whose files of weights are whole its other files and its name. Two hosts may find that at once."""
    mine = work.with_name(f"{work.name}-{uuid.uuid4().hex[:8]}")
    try:
        # Whoever renames it first goes on; the other has nothing to do.
        os.rename(work, mine)
    except FileNotFoundError:
        return
    write_others(mine)
    layout.put_in_place(mine, out, replace=EXPORT if replace else None)


def _original(folder: Path, config: Config, about: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the `config.json` that the run began with, with the type of the weights now; None if there is none, or it is of
    another model."""
    try:
        original = json.loads((folder / CONFIG_FILE).read_text())
        if text_part.is_one(original) or hf_config.meaning(hf_config.read(original)) != hf_config.meaning(config):
            return None
    except (OSError, ValueError, UsageError):
        return None
    name = "dtype" if "dtype" in original else "torch_dtype"
    return original | {name: about["torch_dtype"]}


def _context_of(checkpoint: Place, meta: Mapping[str, Any]) -> int:
    """Returns the length of the texts that a model is for: that of the folder of Hugging Face that the run began with, if its
    rows were not longer."""
    data = meta["arguments"]["data"]
    from trainers.checkpoint import carried

    begun = carried.folder_of(checkpoint)
    known = (begun and hf_config.context(begun)) or 0
    # A packed row has several documents: of how many tokens each, nobody knows here.
    return known if known and data["packing"] is not None else max(data["sequence_length"], known)


def _ends(read: Tokenizer | None, about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns which tokens of the tokenizer begin and end a text, for a `config.json` that does not say it; {} if there is no
    tokenizer."""
    if about.get("eos_token_id", -1) is not None or read is None:
        return {}
    begin, ends = read.begin, read.stop_ids()
    return {
        "bos_token_id": begin[0] if len(begin) == 1 else None,
        "eos_token_id": None if not ends else ends[0] if len(ends) == 1 else list(ends),
    }


def _write_generation(folder: Path, read: Tokenizer | None) -> None:
    """Writes into the `generation_config.json` of an export all that ends a text or a turn of the assistant, as the training and
    generations here have it: the base that the run began with may know another end alone."""
    if read is None:
        return
    path = folder / GENERATION_FILE
    found = json.loads(path.read_text()) if path.is_file() else {}
    ends, texts = list(read.stop_ids()), [*dict.fromkeys((*found.get("stop_strings", []), *read.stop_texts()))]
    found |= {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    found |= {"stop_strings": texts} if texts else {}
    if found:
        path.write_text(json.dumps(found, indent=2) + "\n")


def _tokenizer_of(folder: Path, meta: Mapping[str, Any]) -> Tokenizer | None:
    """Returns the tokenizer in the folder of an export; None if there is none. Its chat template is written there with what the
    run gave it for defaults (`data.template_fields`)."""
    from trainers.text import tokenizers, turns

    # Not `tokenizers.load`, which keeps what it has read: the folder gets another name.
    alone = folder / "tokenizer.json"
    if not (folder / "tokenizer_config.json").is_file():
        return tokenizers.FileTokenizer(str(alone)) if alone.is_file() else None
    if fields := meta["arguments"]["data"].get("template_fields"):
        own = tokenizers.FolderTokenizer(str(folder)).own_template()
        (folder / TEMPLATE_FILE).write_text(turns.with_fields(own, fields))
    return tokenizers.FolderTokenizer(str(folder))


def _class_names(folder: Path) -> dict[str, Any]:
    """Returns what `config.json` says of the classes that the run had, in place of those that it began with; {} if the run had
    none with names."""
    if not (folder / LABELS_FILE).is_file():
        return {}
    names = json.loads((folder / LABELS_FILE).read_text())
    return {"id2label": {str(number): name for number, name in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}


def _to_peft(checkpoint: Place, out: Path, base: str | None, *, replace: bool) -> None:
    from trainers.checkpoint import carried, weights
    from trainers.models.hf.peft import to_adapter

    found = weights.open_whole(checkpoint, alone=True)
    meta, lora = found.meta, _adapters(found.meta, checkpoint)
    # As the run names it, also where this machine does not see it: `base` alone must be found.
    path = str(weights.base_of(meta, base).path) if base else meta[weights.META][BASE]["checkpoint"]
    about, tensors = to_adapter(from_dict(ModelConfig, meta["arguments"]["model"]), lora, found.all_here(), path)

    def write(work: Path) -> None:
        work.mkdir()
        assets.copy_into(work, checkpoint)
        carried.reset_tokenizer(work)
        (work / ADAPTER_FILE).write_text(json.dumps(about, indent=2) + "\n")
        _write_generation(work, _tokenizer_of(work, meta))
        _save_file(tensors, work / "adapter_model.safetensors", {"format": "pt", **ours.MADE_BY})

    _write_atomically(out, write, replace=replace)


def _adapters(meta: Mapping[str, Any], checkpoint: Place | str) -> LoraConfig:
    """Returns the settings of the adapters. Raises UsageError if there are none."""
    from trainers.checkpoint import weights

    config = weights.adapters_of(meta)
    if config is None:
        raise UsageError(f"{checkpoint} has no adapters: it was trained without lora; leave out --adapter")
    return config


FORMATS: dict[str, Callable[..., None]] = {
    "safetensors": to_safetensors,
    "huggingface": to_hugging_face,
    "mlflow": to_mlflow,
}


def _save_file(tensors: Tensors, path: Path, metadata: dict[str, str]) -> None:
    """Writes a file of safetensors with the permissions that any new file of the user has. The library's own are 0600."""
    from safetensors.numpy import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata=metadata)
    path.chmod(mode)


def _has_our_weights(folder: Path) -> bool:
    from safetensors import safe_open

    path = next(folder.glob("*.safetensors"), None)
    try:
        with safe_open(path, "np") as file:
            return (file.metadata() or {}).items() >= ours.MADE_BY.items()
    except Exception:  # there is none, or it is damaged: the library has errors of its own
        return False


EXPORT = ours.Mark("an export that Gangway wrote", _has_our_weights)


def _check_new(*places: Path | Place) -> None:
    for place in places:
        if place.exists() or place.is_dir():
            raise CheckpointError(f"{place} exists already: give a new name")


def _write_atomically(out: Path, write: Callable[[Path], Any], *, replace: bool = False) -> None:
    """Writes atomically: `write` creates a file or folder beside `out`, which is renamed to `out` when it is whole."""
    if not replace:
        _check_new(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.with_name(f"{out.name}.saving-{uuid.uuid4().hex[:8]}")
    try:
        write(work)
        layout.put_in_place(work, out, replace=EXPORT if replace else None)
    finally:
        with suppress(OSError):  # the error that led here is the one to tell
            ours.delete(work, ours.ON_THE_WAY)


LAST = (CONFIG_FILE, ADAPTER_FILE, mlflow_model.FILE)
"""Put after all else of a folder: without it nobody takes the folder for a model."""


def to_bucket(out: str, write: Callable[[Path], None]) -> None:
    """Puts at the URL `out` what `write` makes of a path on this machine: a file, with the folder of its assets, or a folder. The
    machine needs room for it. Raises CheckpointError if there is something already, CheckpointUnavailableError if the storage
    does not take it, and what `write` raises."""
    from trainers.checkpoint import weights

    with weights.reading(out):
        target = place_of(out)
        _check_new(target, beside := _assets_of(target))
    with tempfile.TemporaryDirectory(prefix="gangway-export-") as made:
        local = Path(made, target.name)
        write(local)
        with weights.reading(out):
            if local.is_dir():
                names = sorted(manifest.names_below(place_of(local)), key=lambda name: (name in LAST, name))
                _put([(target / name, local / name) for name in names])
                return
            assets = local.with_name(beside.name)
            names = manifest.names_below(place_of(assets))
            _put([*((beside / name, assets / name) for name in names), (target, local)])


def _assets_of(target: Place) -> Place:
    if not target.key:
        raise CheckpointError(f"{target} is a whole bucket: give a new name in it")
    return target.with_name(Path(target.name).with_suffix(".assets").name)


def _put(files: Iterable[tuple[Place, Path]]) -> None:
    """Puts the files there in this order. If one fails, those before it are deleted again."""
    done: list[Place] = []
    try:
        for place, path in files:
            done.append(place)
            place.store.upload(place.key, path)
    except BaseException:
        with suppress(OSError):
            for place in done:
                ours.delete(place, ours.among("a part of an export that failed", done))
        raise

"""Exports a trained model from a checkpoint on disk to files that other programs read; on one host, without a mesh.

    python -m trainers.export RUN_OR_CHECKPOINT OUT --format huggingface

`safetensors`: all parameters, and the model's other state such as batch statistics, in one file, under their own names
(`layers.query`), with the arguments of the run; the model's
assets go to a folder beside it, which ends in `.assets`.
`huggingface`: a folder with `config.json`, `model.safetensors` and the assets (a tokenizer), as `transformers` reads
models of the families of `model.family`.
RUN_OR_CHECKPOINT is a run's folder (its newest whole checkpoint), a checkpoint, or what `save_pretrained` wrote.

Of a run with `lora`, the adapters are merged with their base. `--adapter` writes the adapters alone: as `huggingface`, a folder
of the library PEFT; as `safetensors`, one file under their own names.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainers.checkpoint import assets, layout
from trainers.config import LoraConfig, ModelConfig
from trainers.config.arguments import from_dict
from trainers.config.frozen import BASE
from trainers.errors import CheckpointError, TransientError, UsageError
from trainers.first_line import say
from trainers.models.hf import config as hf_config
from trainers.models.hf.weights import flat, to_tensors
from trainers.program import program

MAX_FILE_BYTES = 5 << 30
"""The largest size of one file in the Hugging Face format: a larger model gets several files, with an index."""

Tensors = Mapping[str, np.ndarray]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=program("trainers.export"), description=__doc__.splitlines()[0])
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("out", metavar="OUT", help="a new file (safetensors) or folder (huggingface)")
    parser.add_argument("--format", choices=FORMATS, default="safetensors")
    parser.add_argument("--adapter", action="store_true", help="the adapters of a run with lora alone, not merged")
    parser.add_argument("--base", metavar="PATH", help="where the base of a run with lora is now, if it was moved")
    options = parser.parse_args(argv)
    say(f"reading {options.source}", stream=sys.stderr)
    # After the first line: it imports JAX.
    from trainers.checkpoint import weights

    try:
        checkpoint = weights.find(options.source)
        if checkpoint.is_file():
            raise CheckpointError(f"{checkpoint} is a file: expected a run or a checkpoint")
        FORMATS[options.format](checkpoint, options.out, adapter=options.adapter, base=options.base)
    except (UsageError, TransientError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {options.format} of {'the adapters of ' if options.adapter else ''}{checkpoint}")
    return 0


def to_safetensors(checkpoint: Path | str, out: Path | str, *, adapter: bool = False, base: str | None = None) -> None:
    """Writes the file `out`, atomically, and before it the model's assets to the folder beside it whose name ends in `.assets`.
    Of a run with LoRA it has the adapters merged with their base (`base`: where that is now), or with `adapter` the adapters
    alone. Raises CheckpointError if the checkpoint is damaged, or `out` exists."""
    from trainers.checkpoint.whole import read, read_merged

    params, meta = read(Path(checkpoint)) if adapter else read_merged(Path(checkpoint), base)
    if adapter:
        _adapters(meta, checkpoint)
    about = {"batch_index": str(meta["batch_index"]), "arguments": json.dumps(meta["arguments"])}
    _check_new(Path(out))
    if folder := assets.folder_of(Path(checkpoint)):
        _write_atomically(Path(out).with_suffix(".assets"), lambda work: shutil.copytree(folder, work))
    _write_atomically(Path(out), lambda work: _save_file(flat(params), work, about))


def from_safetensors(path: Path | str) -> dict[str, Any]:
    """Returns the parameters in a file of `to_safetensors`, for `train(model_parameters=...)`."""
    from safetensors.numpy import load_file

    params: dict[str, Any] = {}
    for name, value in load_file(path).items():
        *folders, last = name.split(".")
        within = params
        for folder in folders:
            within = within.setdefault(folder, {})
        within[last] = value
    return params


def to_hugging_face(
    checkpoint: Path | str,
    out: Path | str,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    replace: bool = False,
    adapter: bool = False,
    base: str | None = None,
) -> None:
    """Writes the folder `out`, atomically; with `replace`, an existing one is replaced. Of a run with LoRA it has the adapters
    merged with their base (`base`: where that is now), or with `adapter` the adapters alone, in the form of PEFT. Raises
    CheckpointError if the checkpoint is damaged or `out` exists, and UsageError if the model is of no family that
    `transformers` has."""
    if adapter:
        _to_peft(Path(checkpoint), Path(out), base, replace=replace)
        return
    from trainers.checkpoint.whole import read_merged

    params, meta = read_merged(Path(checkpoint), base)
    config = from_dict(ModelConfig, meta["arguments"]["model"])
    tensors = to_tensors(config, params)
    about = hf_config.write(
        config, max_length=meta["arguments"]["data"]["sequence_length"], dtype=next(iter(tensors.values())).dtype.name
    )

    def write(work: Path) -> None:
        work.mkdir()
        assets.copy_into(work, Path(checkpoint))
        # After the assets: none of their files takes the place of the model's own.
        (work / "config.json").write_text(json.dumps(about, indent=2) + "\n")
        _write_files(work, tensors, max_file_bytes)

    _write_atomically(Path(out), write, replace=replace)


def _to_peft(checkpoint: Path, out: Path, base: str | None, *, replace: bool) -> None:
    from trainers.checkpoint.whole import META, base_path, read
    from trainers.models.hf.peft import to_adapter

    params, meta = read(checkpoint)
    lora = _adapters(meta, checkpoint)
    # As the run names it, also where this machine does not see it: `base` alone must be found.
    path = str(base_path(meta, base)) if base else meta[META][BASE]["checkpoint"]
    about, tensors = to_adapter(from_dict(ModelConfig, meta["arguments"]["model"]), lora, flat(params), path)

    def write(work: Path) -> None:
        work.mkdir()
        assets.copy_into(work, checkpoint)
        (work / "adapter_config.json").write_text(json.dumps(about, indent=2) + "\n")
        _save_file(tensors, work / "adapter_model.safetensors", {"format": "pt"})

    _write_atomically(out, write, replace=replace)


def _adapters(meta: Mapping[str, Any], checkpoint: Path | str) -> LoraConfig:
    """Returns the settings of the adapters. Raises UsageError if there are none."""
    from trainers.checkpoint.whole import adapters_of

    config = adapters_of(meta)
    if config is None:
        raise UsageError(f"{checkpoint} has no adapters: it was trained without lora; leave out --adapter")
    return config


FORMATS: dict[str, Callable[..., None]] = {"safetensors": to_safetensors, "huggingface": to_hugging_face}


def _write_files(folder: Path, tensors: Tensors, max_file_bytes: int) -> None:
    files = list(_in_files(tensors, max_file_bytes))
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
        total = sum(tensor.nbytes for tensor in tensors.values())
        file_of = {tensor: name for name, file in zip(names, files, strict=True) for tensor in file}
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for name, file in zip(names, files, strict=True):
        # Copied to their new layout here, file by file: there may be no memory for the whole model twice.
        _save_file({key: np.ascontiguousarray(value) for key, value in file.items()}, folder / name, {"format": "pt"})


def _save_file(tensors: Tensors, path: Path, metadata: dict[str, str]) -> None:
    """Writes a file of safetensors with the permissions that any new file of the user has. The library's own are 0600."""
    from safetensors.numpy import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata=metadata)
    path.chmod(mode)


def _in_files(tensors: Tensors, max_file_bytes: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields the tensors in order, as files of at most `max_file_bytes`; a larger tensor is a file by itself."""
    file: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if file and sum(value.nbytes for value in file.values()) + tensor.nbytes > max_file_bytes:
            yield file
            file = {}
        file[name] = tensor
    yield file


def _check_new(out: Path) -> None:
    if out.exists():
        raise CheckpointError(f"{out} exists already: give a new name")


def _write_atomically(out: Path, write: Callable[[Path], Any], *, replace: bool = False) -> None:
    """Writes atomically: `write` creates a file or folder beside `out`, which is renamed to `out` when it is whole."""
    if not replace:
        _check_new(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.with_name(f"{out.name}.saving-{uuid.uuid4().hex[:8]}")
    try:
        write(work)
        layout.put_in_place(work, out, replace=replace)
    finally:
        if work.is_dir():
            shutil.rmtree(work, ignore_errors=True)
        work.unlink(missing_ok=True)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # accelerators are left to the processes that train
    sys.exit(main())

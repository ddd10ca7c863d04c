"""A trained model in the files that other programs read, from a checkpoint on disk: whatever mesh it was trained on, without one.

    python -m trainers.export RUN_OR_CHECKPOINT OUT --format huggingface

`safetensors`: all parameters in one file, under their own names (`layers.query`), with the arguments of the run.
`huggingface`: a folder with `config.json` and `model.safetensors`, as `transformers` reads a Llama.
RUN_OR_CHECKPOINT is a run's folder (its newest whole checkpoint), a checkpoint, or what `save_pretrained` wrote.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainers.checkpoint import assets, layout, manifest
from trainers.checkpoint.model_only import PART
from trainers.config import ModelConfig
from trainers.config.arguments import from_dict
from trainers.errors import CheckpointError, TransientError, UsageError
from trainers.models.hf.llama import flat, llama_config, llama_tensors

OPTIMIZER = "opt_state"
"""Of the state, as PART is."""
MAX_FILE_BYTES = 5 << 30
"""Of one file in the Hugging Face form: a larger model is several, with an index."""

Tensors = Mapping[str, np.ndarray]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainers.export", description=__doc__.splitlines()[0])
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("out", metavar="OUT", help="a new file (safetensors) or folder (huggingface)")
    parser.add_argument("--format", choices=FORMATS, default="safetensors")
    given = parser.parse_args(argv)
    try:
        checkpoint = find_checkpoint(given.source)
        FORMATS[given.format](checkpoint, given.out)
    except (UsageError, TransientError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{given.out}: {given.format} of {checkpoint}")
    return 0


def find_checkpoint(source: str) -> Path:
    """Raises CheckpointError."""
    folder = layout.local(source)
    if (folder / manifest.MANIFEST_FILE).exists() or not (folder / "checkpoints").is_dir():
        return folder
    steps = [step for step in layout.steps(folder / "checkpoints") if _is_complete(folder / "checkpoints" / str(step))]
    if not steps:
        raise CheckpointError(f"{folder} has no complete checkpoint yet")
    return folder / "checkpoints" / str(steps[-1])


def to_safetensors(checkpoint: Path | str, out: Path | str) -> None:
    """Writes the file `out`, at once or not at all. Raises CheckpointError if the checkpoint is damaged, or `out` exists."""
    from safetensors.numpy import save_file

    params, meta = read(Path(checkpoint))
    about = {"batch_index": str(meta["batch_index"]), "arguments": json.dumps(meta["arguments"])}
    _at_once(Path(out), lambda work: save_file(flat(params), work, metadata=about))


def from_safetensors(path: Path | str) -> dict[str, Any]:
    """The parameters in a file of `to_safetensors`, to be given to `train(model_parameters=...)`."""
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
    checkpoint: Path | str, out: Path | str, *, max_file_bytes: int = MAX_FILE_BYTES, replace: bool = False
) -> None:
    """Writes the folder `out`, at once or not at all; with `replace`, one that is there makes way. Raises CheckpointError if the
    checkpoint is damaged or `out` exists, and UsageError if the model is no Llama."""
    params, meta = read(Path(checkpoint))
    config = from_dict(ModelConfig, meta["arguments"]["model"])
    tensors = llama_tensors(config, params)
    about = llama_config(config, meta["arguments"], next(iter(tensors.values())).dtype)

    def write(work: Path) -> None:
        work.mkdir()
        for asset in assets.read(str(checkpoint)).values():
            if isinstance(asset, Path):  # a tokenizer: its files belong beside the model's
                shutil.copytree(asset, work, dirs_exist_ok=True)
        (work / "config.json").write_text(json.dumps(about, indent=2) + "\n")
        _write_files(work, tensors, max_file_bytes)

    _at_once(Path(out), write, replace=replace)


FORMATS: dict[str, Callable[[Path, str], None]] = {"safetensors": to_safetensors, "huggingface": to_hugging_face}


def read(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the parameters to evaluate, as NumPy arrays; meta). Every byte is checked first. Raises CheckpointError that names
    the damage."""
    from trainers.checkpoint.array_io import ArrayFiles
    from trainers.optim.optimizers import SCHEDULE_FREE, parameters_to_evaluate

    try:
        content = manifest.read(checkpoint)
        if problem := next(content.problems(checkpoint, content.files, digest_up_to=None), ""):
            raise manifest.DamagedError(problem)
        meta = manifest.read_meta(checkpoint)
    except manifest.DamagedError as error:
        raise CheckpointError(f"{checkpoint} cannot be exported: {error}") from error
    arrays, folder = ArrayFiles(), checkpoint / manifest.STATE_FOLDER
    params = arrays.read_part(folder, PART)[PART]
    if meta["arguments"]["optimizer"]["name"] == SCHEDULE_FREE:
        params = parameters_to_evaluate(arrays.read_part(folder, OPTIMIZER)[OPTIMIZER], params)
    return params, meta


def _write_files(folder: Path, tensors: Tensors, max_file_bytes: int) -> None:
    from safetensors.numpy import save_file

    files = list(_in_files(tensors, max_file_bytes))
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
        total = sum(tensor.nbytes for tensor in tensors.values())
        places = {tensor: name for name, file in zip(names, files, strict=True) for tensor in file}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for name, file in zip(names, files, strict=True):
        # Copied in their new layout here, file by file: there may be no room for the whole model twice.
        save_file({key: np.ascontiguousarray(value) for key, value in file.items()}, folder / name, metadata={"format": "pt"})


def _in_files(tensors: Tensors, max_file_bytes: int) -> Iterator[dict[str, np.ndarray]]:
    """In order, each of at most so many bytes, or of one tensor that has more."""
    file: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if file and sum(one.nbytes for one in file.values()) + tensor.nbytes > max_file_bytes:
            yield file
            file = {}
        file[name] = tensor
    yield file


def _at_once(out: Path, write: Callable[[Path], Any], *, replace: bool = False) -> None:
    """`write` makes a file or folder beside `out`, which becomes `out` when it is whole."""
    if out.exists() and not replace:
        raise CheckpointError(f"{out} exists already: give a new name")
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.with_name(f"{out.name}.saving-{uuid.uuid4().hex[:8]}")
    try:
        write(work)
        layout.put_in_place(work, out, replace=replace)
    finally:
        if work.is_dir():
            shutil.rmtree(work, ignore_errors=True)
        work.unlink(missing_ok=True)


def _is_complete(checkpoint: Path) -> bool:
    return (checkpoint / manifest.MANIFEST_FILE).exists()


if __name__ == "__main__":
    import jax

    jax.config.update("jax_platforms", "cpu")  # an accelerator belongs to whoever trains
    sys.exit(main())

"""Whether a checkpoint is whole, and of the model that is trained: as far as can be told before its arrays are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from trainers.checkpoint import manifest
from trainers.errors import CheckpointError
from trainers.step.state import TrainState


def check_files(
    path: Path, step: int | None = None, *, last_resort: bool = False, digest_up_to: int | None = manifest.SMALL_BYTES
) -> tuple[dict[str, Any], str]:
    """(meta, "") or ({}, what is wrong), as far as this host has looked: it checks its share of the files. Digests of large files
    are left to the fingerprints, which see the same bytes, and sooner."""
    try:
        if not last_resort:
            content = manifest.read(path)
            share = {*sorted(content.files)[jax.process_index() :: jax.process_count()], manifest.META_FILE}
            problems = content.problems(path, sorted(share & content.files.keys()), digest_up_to=digest_up_to)
            if problem := next(problems, ""):
                return {}, problem
        meta = manifest.read_meta(path)
    except manifest.DamagedError as error:
        return {}, str(error)
    if step is not None and meta["step"] != step:
        return {}, f"{manifest.META_FILE} is of step {meta['step']}"
    return meta, ""


def check_same_model(meta: dict[str, Any], abstract: Any, path: str) -> None:
    """Raises CheckpointError if the checkpoint's arrays are not those of `abstract`."""
    saved, wanted = meta["shapes"], shapes(abstract)
    different = [name for name in {**saved, **wanted} if saved.get(name) != wanted.get(name)]
    if different:
        shown = "; ".join(f"{n}: {saved.get(n, 'absent')} there, {wanted.get(n, 'absent')} here" for n in different[:3])
        raise CheckpointError(
            f"{path} is a checkpoint of another model or optimizer ({len(different)} arrays differ: {shown}); "
            "restore the settings it was made with, or give the run another name"
        )


def shapes(state: Any) -> dict[str, str]:
    """By name; `state` is a TrainState, or any tree of arrays or their shapes."""
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def num_bytes_of(state: TrainState) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))

"""Checks that a checkpoint is whole, and of the model that is trained, as far as possible before its arrays are loaded."""

from __future__ import annotations

from typing import Any

import jax

from gangway.errors import CheckpointError
from gangway.storage.store import Place
from trainers.checkpoint import manifest


def check_files(
    path: Place, step: int | None = None, *, last_resort: bool = False, digest_up_to: int | None = manifest.SMALL_BYTES
) -> dict[str, Any]:
    """Returns the meta. Raises DamagedError, on this host alone, if one of its files is damaged: each host checks a share of the
    files. Files larger than `digest_up_to` are compared by size: fingerprints check their contents after the arrays are read."""
    if not last_resort:
        content = manifest.read(path)
        # Every n-th file, and the meta on every host: each of them reads it below.
        share = {*sorted(content.files)[jax.process_index() :: jax.process_count()], manifest.META_FILE}
        problems = content.problems(path, sorted(share & content.files.keys()), digest_up_to=digest_up_to)
        if problem := next(problems, ""):
            raise manifest.DamagedError(problem)
    meta = manifest.read_meta(path)
    if step is not None and meta["step"] != step:
        raise manifest.DamagedError(f"{manifest.META_FILE} is of step {meta['step']}")
    return meta


def check_same_model(meta: dict[str, Any], abstract: Any, path: str) -> None:
    """Raises CheckpointError if the checkpoint's arrays are not those of `abstract`."""
    saved, expected = meta["shapes"], shapes(abstract)
    different = [name for name in {**saved, **expected} if saved.get(name) != expected.get(name)]
    if different:
        shown = "; ".join(f"{n}: {saved.get(n, 'absent')} there, {expected.get(n, 'absent')} here" for n in different[:3])
        raise CheckpointError(
            f"{path} is a checkpoint of another model or optimizer ({len(different)} arrays differ: {shown}); "
            "restore the settings it was made with; or give the run another name, and begin with the parameters that fit by "
            f"init_from={path}"
        )


def shapes(state: Any) -> dict[str, str]:
    """Returns type and shape of each leaf by name. `state` is a TrainState, or any tree of arrays or of their shapes."""
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def num_bytes_of(state: Any) -> int:
    """`state` is a tree of arrays, or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))

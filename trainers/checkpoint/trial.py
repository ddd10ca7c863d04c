"""Tries beside the first step whether a state can be saved at all: its names, types and kinds of shape go through the real
serializer, to a folder of this machine and back, with one value in place of each array."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from gangway.storage import json_text, ours
from gangway.storage.opening import place_of
from trainers.checkpoint.array_io import ArrayFiles
from trainers.runtime.multihost import one_line

SHOWN = 3


class UnsavableError(Exception):
    """The state, or what a checkpoint records beside it, cannot be saved anywhere: no later try will succeed."""


def seal_meta(meta: Mapping[str, Any]) -> str:
    """Returns the meta as text. Raises UnsavableError that names what of it is no JSON."""
    try:
        return json_text.seal(dict(meta))
    except (TypeError, ValueError, RecursionError) as error:
        bad = [name for name, value in meta.items() if not _is_json(name, value)]
        raise UnsavableError(f"{', '.join(bad) or 'what'} of its record cannot be written as JSON: {one_line(error)}") from error


def problem(abstract: Any) -> str:
    """Returns why a tree of such arrays cannot be saved, with the names of its leaves; empty if it can. `abstract` has arrays, or
    their shapes with shardings. Waits for the local disk alone, and for no other host."""
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(abstract)}
    with ThreadPoolExecutor(1) as thread:  # a thread that has an event loop, as in a notebook, cannot run Orbax's
        if not (whole := thread.submit(_try, abstract).result()):
            return ""
        each = {name: why for name, leaf in leaves.items() if (why := thread.submit(_try, {"leaf": leaf}).result())}
    if not each:  # only together: two names that are the same file, say
        return whole
    more = f"; and {len(each) - SHOWN} more" if len(each) > SHOWN else ""
    shown = [f"{name} ({leaves[name].dtype}{list(leaves[name].shape)}): {why}" for name, why in each.items()]
    return "; ".join(shown[:SHOWN]) + more


def _try(abstract: Any) -> str:
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="trial-"))
        files, small = ArrayFiles(), jax.tree.map(_small, abstract)
        place = place_of(folder)
        files.write(place, lambda: small, lambda: None)
        files.merge(place)
        back = files.read(place, small)
        jax.tree.map(_check_same, small, back)
    except OSError:
        return ""  # this machine's disk is none of the state's
    except Exception as error:  # Orbax raises whatever its layers raise
        return one_line(error)
    finally:
        if folder is not None:
            with suppress(OSError):
                ours.delete(folder, ours.among("the folder of a trial", {folder}))
    return ""


def _small(leaf: Any) -> jax.Array:
    """Returns an array of the same type and number of dimensions, of which each is 1, or 0 where the leaf has none."""
    shape, sharding = tuple(min(size, 1) for size in leaf.shape), leaf.sharding
    everywhere = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.device_put(jnp.broadcast_to(jax.random.key(0, impl=jax.random.key_impl(leaf)), shape), everywhere)
    value = np.ones(shape, leaf.dtype)
    return jax.make_array_from_callback(shape, everywhere, lambda index: value[index])


def _check_same(saved: jax.Array, back: jax.Array) -> None:
    if saved.dtype != back.dtype or saved.shape != back.shape:
        raise TypeError(f"what was saved as {saved.dtype}{list(saved.shape)} reads as {back.dtype}{list(back.shape)}")


def _is_json(name: str, value: Any) -> bool:
    try:
        json_text.seal({name: value})
    except (TypeError, ValueError, RecursionError):
        return False
    return True

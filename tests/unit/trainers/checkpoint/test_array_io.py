"""The files of a tree of arrays."""

import asyncio

import jax.numpy as jnp
import numpy as np

from gangway.storage.opening import place_of
from trainers.checkpoint.array_io import ArrayFiles


def test_many_small_arrays_share_a_few_files_and_come_back(tmp_path):
    """A file for each array of each host would be too many for a shared storage."""
    tree = {f"leaf_{number}": jnp.full((4,), number, jnp.float32) for number in range(60)}
    files, copied = ArrayFiles(), []
    tmp_path.joinpath("state").mkdir()
    files.write(place_of(tmp_path / "state"), lambda: tree, lambda: copied.append(True))
    files.merge(place_of(tmp_path / "state"))
    assert copied == [True]
    assert sum(path.is_file() for path in tmp_path.rglob("*")) < len(tree) / 2
    back = files.read(place_of(tmp_path / "state"), tree)
    assert all(np.array_equal(back[name], leaf) for name, leaf in tree.items())


def test_training_does_not_wait_until_the_loop_of_a_save_is_closed(tmp_path):
    """Which takes as long as copying, while other threads write."""
    loops = []
    tmp_path.joinpath("state").mkdir()
    ArrayFiles().write(
        place_of(tmp_path / "state"), lambda: {"leaf": jnp.ones(4)}, lambda: loops.append(asyncio.get_running_loop())
    )
    assert len(loops) == 1

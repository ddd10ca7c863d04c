"""The state that a run begins with: from the seed, from files, or from what was given. It is made again when a rollback goes back
to the beginning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from gangway.errors import UsageError
from trainers import runtime
from trainers.checkpoint.weights import Adapted
from trainers.config.weights import InitConfig, from_plain
from trainers.loop import init_from
from trainers.optim.param_groups import parameter_path
from trainers.step.state import TrainState


class Beginning(Protocol):
    origin: dict[str, Any] | None
    """What the first parameters were loaded from (`trainers.loop.init_from`); None: not from files."""
    meta: dict[str, Any]
    """The meta of the checkpoint that `make` has loaded; empty if it loaded none."""

    def make(self) -> TrainState:
        """Returns the state to begin with. All hosts must call this."""

    def continues(self, meta: Mapping[str, Any]) -> str:
        """Takes note that the run goes on from the checkpoint with this meta. Returns what is not used for that reason, such as
        `the given state`; empty if there is nothing to say."""


class FromSettings:
    """Parameters from the seed, or those that `init_from` names."""

    def __init__(
        self,
        config: InitConfig | None,
        run_folder: str,
        params: Any,
        fresh: Callable[..., TrainState],
        adapted: Adapted | None = None,
    ):
        """`params` are the shapes of the model's parameters, with shardings. `fresh` makes a state at step 0 with the loaded
        parameters, by name, and the others from the seed. It uses up its first argument, and casts the second."""
        self._config, self._run_folder, self._params, self._fresh = config, run_folder, params, fresh
        self._adapted = adapted
        self.meta: dict[str, Any] = {}
        self.origin: dict[str, Any] | None = None

    def make(self) -> TrainState:
        if self._config is None:
            return self._fresh({}, {})
        loaded = init_from.load(self._config, self.origin, self._run_folder, self._params, self._adapted)
        if self.origin is None and jax.process_index() == 0:
            runtime.current().note(loaded.said)
        self.origin = loaded.origin
        types = {parameter_path(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(self._params)}
        of_type = {name: array for name, array in loaded.arrays.items() if array.dtype == types[name]}
        return self._fresh(of_type, {name: array for name, array in loaded.arrays.items() if name not in of_type})

    def continues(self, meta: Mapping[str, Any]) -> str:
        configured, self.origin = self._config, meta.get("init_from")
        # From now on the beginning is the one of the checkpoint, whatever the settings say now: a rollback may go back to it.
        self._config = None if self.origin is None else from_plain(self.origin)
        return "" if configured is None or configured == self._config else "init_from"


class Given:
    """A state, or parameters, that the caller of `train` passed in."""

    def __init__(self, given: str, place: Callable[[], Any], finish: Callable[[Any], TrainState], *, keep: bool):
        """`given` names it in a note, if it is not used; empty: there is no note. `place` puts on the devices what was given, and
        `finish` makes a state of that. `keep`:
        whether `make` may be called again; each host then keeps a copy of its part, because training donates the state."""
        self._given, self._place, self._finish, self._keep = given, place, finish, keep
        self.origin: dict[str, Any] | None = None
        self.meta: dict[str, Any] = {}
        self._copy: HostCopy | None = None
        self._made = False

    def make(self) -> TrainState:
        """Raises UsageError if it was used up before, and no copy was kept."""
        if self._copy is not None:
            return self._finish(self._copy.put())
        if self._made:
            raise UsageError(
                f"training must go back to its beginning, and {self._given or 'the arrays of configure_model'} cannot be had "
                "again: save more often (checkpoint.save_steps), or set anomalies.non_finite to rollback, which keeps a copy"
            )
        self._made = True
        placed = self._place()
        if self._keep:
            self._copy = HostCopy(placed)
        return self._finish(placed)

    def continues(self, meta: Mapping[str, Any]) -> str:
        return self._given


def given_arrays(params: Any, abstract: Any, optional: Collection[str] = ()) -> dict[str, jax.Array]:
    """Returns the model's arrays on the devices, by name, with the shapes, types and shardings of `abstract`. `params` are
    arrays, NumPy's too, in the model's own tree or in nested dicts of the same names. Those in `optional` may be missing. Raises
    UsageError that names every wrong one."""
    named = dict(_named(params))
    wanted = {parameter_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(abstract)}
    problems = [f"{name} is missing" for name in wanted if name not in named and name not in optional]
    problems += [f"{name} is not in the model" for name in named if name not in wanted]
    problems += [
        f"{name} is {list(np.shape(named[name]))}, expected {list(leaf.shape)}"
        for name, leaf in wanted.items()
        if name in named and np.shape(named[name]) != leaf.shape
    ]
    if problems:
        raise UsageError(f"the given parameters are not those of the model: {'; '.join(problems)}")
    return {name: _put(named[name], leaf) for name, leaf in wanted.items() if name in named}


def arrays_in(state: TrainState) -> dict[str, Any]:
    """Returns the leaves that are arrays, and no shapes, by their paths in the state."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves if not isinstance(leaf, jax.ShapeDtypeStruct)}


def with_types_of(own: TrainState | None, state: TrainState) -> TrainState:
    """Returns the state with arrays of the types that the model's own state `own` has, or else of those that JAX has."""
    leaves = jax.tree_util.tree_leaves_with_path(own)
    types = {jax.tree_util.keystr(path): leaf.dtype for path, leaf in leaves}

    def cast(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        leaf = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        return leaf.astype(types.get(jax.tree_util.keystr(path), jax.dtypes.canonicalize_dtype(leaf.dtype)))

    return jax.tree_util.tree_map_with_path(cast, state)


def placed_like(arrays: Mapping[str, Any], abstract: TrainState) -> dict[str, jax.Array]:
    """Returns the arrays on the devices, with the types and shardings of `abstract`."""
    wanted = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(abstract)}
    return {name: _put(value, wanted[name]) for name, value in arrays.items()}


def with_arrays(arrays: Mapping[str, jax.Array], abstract: TrainState, fresh: Callable[[], TrainState]) -> TrainState:
    """Returns the state with these arrays, and for the other leaves of `abstract` those of `fresh`. Raises UsageError if `fresh`
    has no such leaf. Traced."""
    # Copies: training donates its state, and the user's arrays must stay for a later training.
    found: dict[str, jax.Array] = {name: jnp.copy(array) for name, array in arrays.items()}
    if any(jax.tree_util.keystr(path) not in found for path, _ in jax.tree_util.tree_leaves_with_path(abstract)):
        made = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(fresh())}
        found = {**made, **found}

    def leaf_of(path: Any, wanted: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        leaf = found.get(name)
        if leaf is None or leaf.shape != wanted.shape:
            shape = "none" if leaf is None else list(leaf.shape)
            raise UsageError(
                f"configure_model returned a state with {name} {list(wanted.shape)}, of which only the shape is there, and the "
                f"model has {shape}: give an array for it"
            )
        return leaf

    return jax.tree_util.tree_map_with_path(leaf_of, abstract)


def _named(tree: Any, prefix: str = "") -> Any:
    if not isinstance(tree, Mapping):
        yield prefix, tree
        return
    for key, value in tree.items():
        yield from _named(value, f"{prefix}.{key}" if prefix else str(key))


def _put(value: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    if isinstance(value, jax.Array):
        return jax.device_put(value.astype(like.dtype), like.sharding)
    host = np.asarray(value)
    # By parts: `device_put` would compare the whole array between all hosts.
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: host[index].astype(like.dtype))


Index = tuple[tuple[int | None, int | None], ...]
"""The part of an array that a device has: (start, stop) of each dimension."""


class HostCopy:
    """The parts of the arrays of `tree` that this host's devices have. It stays as it is when the arrays are donated."""

    def __init__(self, tree: Any):
        self._arrays = jax.tree.map(_Array, tree)

    def put(self) -> Any:
        """Returns the tree of arrays, each with the sharding that it had. All hosts must call this."""
        return jax.tree.map(lambda array: array.put(), self._arrays)


class _Array:
    def __init__(self, array: jax.Array):
        self.shape, self.sharding, self.parts = array.shape, array.sharding, dict[Index, np.ndarray]()
        for shard in array.addressable_shards:
            if _key(shard.index) not in self.parts:
                # A copy: NumPy may look into the device's own memory, which the next donation overwrites.
                self.parts[_key(shard.index)] = np.array(shard.data)

    def put(self) -> jax.Array:
        # A copy again: an array on a CPU may use NumPy's memory, and would be donated with it.
        return jax.make_array_from_callback(self.shape, self.sharding, lambda index: self.parts[_key(index)].copy())


def _key(index: Any) -> Index:
    return tuple((part.start, part.stop) for part in index)

"""Where a loss or gradient stopped being finite: the first module and operation, found by computing the batch once more.

The computation is taken apart into its operations and compiled anew, with a look at what each has made. That costs a compilation
and a step, and is done for one batch of a run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import source_info_util
from jax.extend import core
from jax.sharding import Mesh

from trainers.parallel import mesh as meshes
from trainers.runtime.device import wait_for_device
from trainers.runtime.multihost import in_stages

Objective = Callable[[Any, Any, Any], jax.Array]
"""(parameters, micro-batch, number of updates) -> loss."""

INLINED = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters of an operation that hold what it calls. Loops with a condition, and branches, are taken as one operation."""
OPAQUE = ("while", "cond", "pallas_call", "custom_partitioning", "shard_map")
MOVES = (
    *("broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "expand_dims", "neg", "optimization_barrier", "reshape", "rev"),
    *("sharding_constraint", "slice", "split", "squeeze", "stop_gradient", "transpose"),
)
"""Operations that make nothing non-finite of finite inputs: they are not looked at, which makes the program a third the size."""

FINITE, INFINITE, NAN = 0, 1, 2
"""The worst in an array."""
UNNAMED = ("rematted_computation", "checkpoint")
"""Scopes that JAX itself adds."""


@dataclass(frozen=True)
class Site:
    """An operation of the program."""

    scopes: tuple[str, ...]
    operation: str
    line: str
    """File, line and function of the user's code; empty if unknown."""
    backward: bool

    def in_rounds(self, rounds: tuple[int, ...]) -> Site:
        """With the numbers of the loops' rounds, the outermost first."""
        numbers = iter(rounds)
        scopes = tuple(str(next(numbers)) if scope == ROUND else scope for scope in self.scopes)
        return replace(self, scopes=scopes)

    def __str__(self) -> str:
        where = "/".join(self.scopes) or "the loss"
        gradient = "the gradient of " if self.backward else ""
        return f"{gradient}{where}, operation {self.operation}" + (f" ({self.line})" if self.line else "")


@dataclass(frozen=True)
class Known:
    """Where it is told how an array is: the places of codes in its level, and what is known without them."""

    places: tuple[int, ...] = ()
    constant: int = FINITE

    def worst(self, codes: np.ndarray) -> int:
        return max((self.constant, *(int(codes[place]) for place in self.places)))


@dataclass(frozen=True)
class Operation:
    site: Site
    inputs: Known
    outputs: Known


class Level:
    """A program, or the body of a loop: its operations in order, and what is told of its arrays while it is traced."""

    def __init__(self) -> None:
        self.steps: list[Operation | Loop] = []
        self._codes: list[jax.Array] = []
        self._loops: list[jax.Array] = []
        self._size_of_loops = 0

    def look_at(self, value: Any) -> Known:
        if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
            return Known()
        self._codes.append(
            jnp.max(jnp.where(jnp.isnan(value), NAN, jnp.where(jnp.isinf(value), INFINITE, FINITE)), initial=FINITE)
        )
        return Known((len(self._codes) - 1,))

    def add_loop(self, loop: Loop, codes: jax.Array) -> None:
        self.steps.append(loop)
        self._loops.append(codes)
        self._size_of_loops += loop.length * loop.body.size

    def vector(self) -> jax.Array:
        """All that is told: int8[size]."""
        parts = [jnp.stack(self._codes)] if self._codes else []
        return jnp.concatenate([jnp.ravel(part).astype(jnp.int8) for part in (*parts, *self._loops)] or [jnp.zeros(0, jnp.int8)])

    @property
    def size(self) -> int:
        return len(self._codes) + self._size_of_loops

    def culprits(self, codes: np.ndarray, rounds: tuple[int, ...] = ()) -> Iterator[tuple[Site, int]]:
        """In order, the operations that made something worse than their inputs, and what: INFINITE for anything non-finite made
        of finite inputs, NAN for a NaN made of infinities, which may have been there on purpose."""
        start = len(self._codes)
        for step in self.steps:
            if isinstance(step, Loop):
                size = step.length * step.body.size
                own, start = codes[start : start + size].reshape(step.length, -1), start + size
                for number in range(step.length - 1, -1, -1) if step.reverse else range(step.length):
                    yield from step.body.culprits(own[number], (*rounds, number))
                continue
            before, after = step.inputs.worst(codes), step.outputs.worst(codes)
            if after > before:
                yield step.site.in_rounds(rounds), INFINITE if before == FINITE else NAN


@dataclass(frozen=True)
class Loop:
    body: Level
    length: int
    reverse: bool


def find(objective: Objective, mesh: Mesh, params: Any, batch: Any, step: Any) -> tuple[str, str]:
    """(where the loss of this batch or its gradient stopped being finite, ""), or ("", why that could not be found).

    Leaves of `batch` are [micro-batches, rows, ...]. All hosts must call this; all get the same answer.
    """
    search = _Search(objective, params, batch)
    program = jax.jit(search.codes, out_shardings=meshes.replicated(mesh))
    indices = [meshes.put_everywhere(mesh, np.array(index, np.int32)) for index in range(jax.tree.leaves(batch)[0].shape[0])]

    def compiled(_: Any) -> Any:
        return program.lower(params, batch, step, indices[0]).compile()

    def run(made: Any) -> list[np.ndarray]:
        return [wait_for_device(made(params, batch, step, index)) for index in indices]

    answer, problem = in_stages("first non-finite value", compiled, run, search.answer)
    return answer or "", problem


class _Search:
    def __init__(self, objective: Objective, params: Any, batch: Any):
        self.objective = objective
        self.leaves = [*_names(params, "parameter"), *_names(batch, "input")]
        self.level = Level()

    def codes(self, params: Any, batch: Any, step: Any, index: Any) -> jax.Array:
        """Traced: how each leaf is, and each array on the way to the loss and gradient of micro-batch `index`."""
        micro_batch = jax.tree.map(lambda leaf: leaf[index], batch)
        gradient = jax.value_and_grad(lambda params, batch: self.objective(params, batch, step).astype(jnp.float32))
        program = jax.make_jaxpr(gradient)(params, micro_batch)
        leaves = jax.tree.leaves((params, micro_batch))
        self.level = level = Level()
        self.known = [level.look_at(leaf) for leaf in leaves]
        consts = [(value, level.look_at(value)) for value in program.consts]
        _evaluate(level, program.jaxpr, consts, list(zip(leaves, self.known, strict=True)), ())
        return level.vector()

    def answer(self, codes_of_micro_batches: Iterable[np.ndarray]) -> str:
        for index, codes in enumerate(codes_of_micro_batches):
            for name, known in zip(self.leaves, self.known, strict=True):
                if known.worst(codes) != FINITE:
                    return f"{name} is not finite itself"
            culprits = list(self.level.culprits(codes))
            for wanted in (INFINITE, NAN):
                if site := next((site for site, made in culprits if made == wanted), None):
                    return f"the first non-finite value is made by {site}, micro-batch {index}"
        return (
            "computed once more, every value of the loss and of its gradient is finite: it is their sums or the gradients' norm "
            "that are not, or a callback changed the batch"
        )


Told = tuple[Any, Known]
"""An array, and what is known of it."""


def _evaluate(level: Level, jaxpr: Any, consts: list[Told], args: list[Told], scopes: tuple[str, ...]) -> list[Told]:
    """What the program computes; adds its operations to `level`."""
    values: dict[Any, Told] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Told:
        return (atom.val, Known(constant=_worst(atom.val))) if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        values.update(zip(equation.outvars, _apply(level, equation, inputs, (*scopes, *_scopes_of(equation))), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(level: Level, equation: Any, inputs: list[Told], scopes: tuple[str, ...]) -> list[Told]:
    if equation.primitive.name == "scan":
        return _scan(level, equation, inputs, scopes)
    inner = _called(equation)
    if inner is not None and len(inner.jaxpr.invars) == len(inputs):
        return _evaluate(level, inner.jaxpr, [(value, level.look_at(value)) for value in inner.consts], inputs, scopes)
    outputs = _bind(equation, [value for value, _ in inputs])
    before = _all_of(known for _, known in inputs)
    if equation.primitive.name in MOVES:
        return [(output, before) for output in outputs]
    told = [(output, level.look_at(output)) for output in outputs]
    level.steps.append(Operation(_site(equation, scopes), before, _all_of(known for _, known in told)))
    return told


def _scan(level: Level, equation: Any, inputs: list[Told], scopes: tuple[str, ...]) -> list[Told]:
    params, body, values = equation.params, equation.params["jaxpr"], [value for value, _ in inputs]
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, carry, xs = values[:num_consts], values[num_consts : num_consts + num_carry], values[num_consts + num_carry :]
    inner = Level()

    def round_(carry: list[Any], xs: list[Any]) -> tuple[list[Any], tuple[list[Any], jax.Array]]:
        nonlocal inner
        inner = Level()  # the body may be traced more than once
        args = [(value, inner.look_at(value)) for value in (*consts, *carry, *xs)]
        told = _evaluate(inner, body.jaxpr, [(value, inner.look_at(value)) for value in body.consts], args, (*scopes, ROUND))
        outputs = [value for value, _ in told]
        return outputs[:num_carry], (outputs[num_carry:], inner.vector())

    carry, (ys, codes) = jax.lax.scan(round_, carry, xs, length=params["length"], reverse=params["reverse"])
    level.add_loop(Loop(inner, params["length"], params["reverse"]), codes)
    return [(value, level.look_at(value)) for value in (*carry, *ys)]


def _bind(equation: Any, inputs: list[Any]) -> list[Any]:
    with equation.ctx.manager:
        outputs = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def _called(equation: Any) -> Any:
    """The closed program that an operation calls, if it is a plain call."""
    if equation.primitive.name in OPAQUE:
        return None
    inner = next((equation.params[name] for name in INLINED if name in equation.params), None)
    return core.ClosedJaxpr(inner, ()) if isinstance(inner, core.Jaxpr) else inner


def _all_of(known: Iterable[Known]) -> Known:
    every = list(known)
    places = {place: None for one in every for place in one.places}
    return Known(tuple(places), max((one.constant for one in every), default=FINITE))


def _worst(value: Any) -> int:
    """Of a constant in the program."""
    array = np.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return FINITE
    return NAN if np.isnan(array).any() else INFINITE if np.isinf(array).any() else FINITE


def _site(equation: Any, scopes: tuple[str, ...]) -> Site:
    named = tuple(scope for scope in scopes if scope != BACKWARD)
    return Site(named, equation.primitive.name, _line_of(equation), BACKWARD in scopes)


ROUND = "{}"
"""Stands among the scopes for the number of the round of a loop."""
BACKWARD = "(backward)"


def _scopes_of(equation: Any) -> tuple[str, ...]:
    """The names the program gave (`jax.named_scope`), without those of its transformations but that it runs backward."""
    parts = equation.source_info.name_stack.stack
    scopes = (part.name for part in parts if isinstance(part, source_info_util.Scope))
    named = tuple(name for name in scopes if name not in UNNAMED)
    backward = any(isinstance(part, source_info_util.Transform) and part.name == "transpose" for part in parts)
    return (BACKWARD, *named) if backward else named


def _line_of(equation: Any) -> str:
    frame = source_info_util.user_frame(equation.source_info.traceback)
    if frame is None:
        return ""
    near = os.path.relpath(frame.file_name)
    name = frame.file_name if near.startswith("..") else near
    return f"{name}:{frame.start_line} in {frame.function_name}"


def _names(tree: Any, kind: str) -> list[str]:
    return [f"{kind} {jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(tree)]

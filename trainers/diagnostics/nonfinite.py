"""Finds where a loss or gradient stopped being finite: the first module and operation, by computing the batch once more.

The computation is taken apart into its operations and compiled again, with a check of the result of each. That costs a
compilation and a step, and is done for one batch of a run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh

from trainers.jax_internals import source_info_util
from trainers.parallel import mesh as meshes
from trainers.parallel.platform import wait_for_device
from trainers.runtime.multihost import in_stages

Objective = Callable[[Any, Any, Any, Any], jax.Array]
"""(parameters, micro-batch, its number, what else the loss depends on) -> loss."""

INLINED = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""The parameters of an operation that hold a program it calls. Loops with a condition, and branches, count as one operation."""
OPAQUE = ("while", "cond", "pallas_call", "custom_partitioning", "shard_map")
MOVES = (
    *("broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "expand_dims", "neg", "optimization_barrier", "reshape", "rev"),
    *("sharding_constraint", "slice", "split", "squeeze", "stop_gradient", "transpose"),
)
"""Operations that make nothing non-finite from finite inputs. They are not checked, which makes the program a third of the
size."""

FINITE, INFINITE, NAN = 0, 1, 2
"""The codes for the worst value in an array."""
UNNAMED = ("rematted_computation", "checkpoint")
"""Scopes that JAX itself adds; they are not shown."""


@dataclass(frozen=True)
class Site:
    """An operation of the program, as it is shown to the user."""

    scopes: tuple[str, ...]
    operation: str
    line: str
    """File, line and function of the user's code; empty if unknown."""
    backward: bool

    def in_iterations(self, iterations: tuple[int, ...]) -> Site:
        """Returns the site with the numbers of the loops' iterations, the outermost first."""
        numbers = iter(iterations)
        scopes = tuple(str(next(numbers)) if scope == ITERATION else scope for scope in self.scopes)
        return replace(self, scopes=scopes)

    def __str__(self) -> str:
        where = "/".join(self.scopes) or "the loss"
        gradient = "the gradient of " if self.backward else ""
        return f"{gradient}{where}, operation {self.operation}" + (f" ({self.line})" if self.line else "")


@dataclass(frozen=True)
class CodeRef:
    """Where to find the code of an array: the indices of codes in its level, and a constant part known without them."""

    indices: tuple[int, ...] = ()
    constant: int = FINITE

    def worst(self, codes: np.ndarray) -> int:
        return max((self.constant, *(int(codes[index]) for index in self.indices)))


@dataclass(frozen=True)
class Operation:
    site: Site
    inputs: CodeRef
    outputs: CodeRef


class Level:
    """A program, or the body of a loop: its operations in order, and the codes of its arrays while it is traced."""

    def __init__(self) -> None:
        self.steps: list[Operation | Loop] = []
        self._codes: list[jax.Array] = []
        self._loops: list[jax.Array] = []
        self._size_of_loops = 0

    def add_code(self, value: Any) -> CodeRef:
        if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
            # Integers and bools are always finite: no code is spent on them.
            return CodeRef()
        self._codes.append(
            # `initial`: an array may be empty.
            jnp.max(jnp.where(jnp.isnan(value), NAN, jnp.where(jnp.isinf(value), INFINITE, FINITE)), initial=FINITE)
        )
        return CodeRef((len(self._codes) - 1,))

    def add_loop(self, loop: Loop, codes: jax.Array) -> None:
        self.steps.append(loop)
        self._loops.append(codes)
        self._size_of_loops += loop.length * loop.body.size

    def vector(self) -> jax.Array:
        """Returns all codes: int8[size]."""
        parts = [jnp.stack(self._codes)] if self._codes else []
        return jnp.concatenate([jnp.ravel(part).astype(jnp.int8) for part in (*parts, *self._loops)] or [jnp.zeros(0, jnp.int8)])

    @property
    def size(self) -> int:
        return len(self._codes) + self._size_of_loops

    def culprits(self, codes: np.ndarray, iterations: tuple[int, ...] = ()) -> Iterator[tuple[Site, int]]:
        """Yields in order the operations whose output is worse than their inputs, and how: INFINITE for anything non-finite
        made from finite inputs, NAN for a NaN made from infinities, which may be there on purpose."""
        start = len(self._codes)
        for step in self.steps:
            if isinstance(step, Loop):
                size = step.length * step.body.size
                loop_codes, start = codes[start : start + size].reshape(step.length, -1), start + size
                # A reversed scan computes its last iteration first: the order here is that of the computation.
                for number in range(step.length - 1, -1, -1) if step.reverse else range(step.length):
                    yield from step.body.culprits(loop_codes[number], (*iterations, number))
                continue
            # An operation with bad inputs only passes them on: the culprit is one whose output is worse.
            before, after = step.inputs.worst(codes), step.outputs.worst(codes)
            if after > before:
                yield step.site.in_iterations(iterations), INFINITE if before == FINITE else NAN


@dataclass(frozen=True)
class Loop:
    body: Level
    length: int
    reverse: bool


def find(objective: Objective, mesh: Mesh, params: Any, batch: Any, others: Any) -> str:
    """Returns where the loss of this batch or its gradient stopped being finite. Raises StageError if that cannot be found.

    Leaves of `batch` are [micro-batches, rows, ...]. `others` is what the objective gets last: a tree of arrays. All hosts must
    call this; all get the same answer.
    """
    search = _Search(objective, params, batch)
    program = jax.jit(search.codes, out_shardings=meshes.replicated(mesh))
    # As an argument and not a constant: one program serves all micro-batches.
    indices = [meshes.put_everywhere(mesh, np.array(index, np.int32)) for index in range(jax.tree.leaves(batch)[0].shape[0])]

    # A stage of its own, without a collective: compiling may fail on one host alone.
    def compiled(_: Any) -> Any:
        return program.lower(params, batch, others, indices[0]).compile()

    def run(executable: Any) -> list[np.ndarray]:
        return [wait_for_device(executable(params, batch, others, index)) for index in indices]

    return in_stages("first non-finite value", compiled, run, search.answer)


class _Search:
    def __init__(self, objective: Objective, params: Any, batch: Any):
        self.objective = objective
        self.leaves = [*_names(params, "parameter"), *_names(batch, "input")]
        self.level = Level()

    def codes(self, params: Any, batch: Any, others: Any, index: Any) -> jax.Array:
        """Returns the codes of each leaf, and of each array on the way to the loss and the gradient of micro-batch `index`.
        Traced."""
        micro_batch = jax.tree.map(lambda leaf: leaf[index], batch)
        # With the batch as an argument of the function: its leaves must be inputs of the program, not constants.
        gradient = jax.value_and_grad(lambda params, batch: self.objective(params, batch, index, others).astype(jnp.float32))
        program = jax.make_jaxpr(gradient)(params, micro_batch)
        leaves = jax.tree.leaves((params, micro_batch))
        self.level = level = Level()
        self.refs = [level.add_code(leaf) for leaf in leaves]
        consts = [(value, level.add_code(value)) for value in program.consts]
        _evaluate(level, program.jaxpr, consts, list(zip(leaves, self.refs, strict=True)), ())
        return level.vector()

    def answer(self, codes_of_micro_batches: Iterable[np.ndarray]) -> str:
        for index, codes in enumerate(codes_of_micro_batches):
            # The inputs first: what is bad from the beginning is the fault of no operation.
            for name, ref in zip(self.leaves, self.refs, strict=True):
                if ref.worst(codes) != FINITE:
                    return f"{name} is not finite itself"
            culprits = list(self.level.culprits(codes))
            # A NaN made from infinities counts only if nothing else is found: masks hold infinities on purpose.
            for worst in (INFINITE, NAN):
                if site := next((site for site, code in culprits if code == worst), None):
                    return f"the first non-finite value is made by {site}, micro-batch {index}"
        return (
            "computed once more, every value of the loss and of its gradient is finite: it is their sums, the gradients' norm or "
            "the model's state that are not, or a callback changed the batch"
        )


Traced = tuple[Any, CodeRef]
"""An array, and where its code is."""


def _evaluate(level: Level, jaxpr: Any, consts: list[Traced], args: list[Traced], scopes: tuple[str, ...]) -> list[Traced]:
    """Computes what the program computes, and adds its operations to `level`."""
    values: dict[Any, Traced] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Traced:
        return (atom.val, CodeRef(constant=_worst(atom.val))) if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        values.update(zip(equation.outvars, _apply(level, equation, inputs, (*scopes, *_scopes_of(equation))), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(level: Level, equation: Any, inputs: list[Traced], scopes: tuple[str, ...]) -> list[Traced]:
    if equation.primitive.name == "scan":
        return _scan(level, equation, inputs, scopes)
    inner = _called(equation)
    if inner is not None and len(inner.jaxpr.invars) == len(inputs):
        return _evaluate(level, inner.jaxpr, [(value, level.add_code(value)) for value in inner.consts], inputs, scopes)
    outputs = _bind(equation, [value for value, _ in inputs])
    input_ref = _all_of(ref for _, ref in inputs)
    if equation.primitive.name in MOVES:
        # What only moves values has the codes of its inputs: nothing to check, and nothing to compute.
        return [(output, input_ref) for output in outputs]
    traced = [(output, level.add_code(output)) for output in outputs]
    level.steps.append(Operation(_site(equation, scopes), input_ref, _all_of(ref for _, ref in traced)))
    return traced


def _scan(level: Level, equation: Any, inputs: list[Traced], scopes: tuple[str, ...]) -> list[Traced]:
    params, body, values = equation.params, equation.params["jaxpr"], [value for value, _ in inputs]
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, carry, xs = values[:num_consts], values[num_consts : num_consts + num_carry], values[num_consts + num_carry :]
    inner = Level()

    def iteration(carry: list[Any], xs: list[Any]) -> tuple[list[Any], tuple[list[Any], jax.Array]]:
        nonlocal inner
        inner = Level()  # the body may be traced more than once
        args = [(value, inner.add_code(value)) for value in (*consts, *carry, *xs)]
        body_consts = [(value, inner.add_code(value)) for value in body.consts]
        outputs = [value for value, _ in _evaluate(inner, body.jaxpr, body_consts, args, (*scopes, ITERATION))]
        return outputs[:num_carry], (outputs[num_carry:], inner.vector())

    # codes: [length, size of the body], stacked by the scan.
    carry, (ys, codes) = jax.lax.scan(iteration, carry, xs, length=params["length"], reverse=params["reverse"])
    level.add_loop(Loop(inner, params["length"], params["reverse"]), codes)
    return [(value, level.add_code(value)) for value in (*carry, *ys)]


def _bind(equation: Any, inputs: list[Any]) -> list[Any]:
    with equation.ctx.manager:
        outputs = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def _called(equation: Any) -> Any:
    """Returns the closed program that an operation calls, if it is a plain call."""
    if equation.primitive.name in OPAQUE:
        return None
    inner = next((equation.params[name] for name in INLINED if name in equation.params), None)
    return core.ClosedJaxpr(inner, ()) if isinstance(inner, core.Jaxpr) else inner


def _all_of(refs: Iterable[CodeRef]) -> CodeRef:
    all_refs = list(refs)
    indices = {index: None for ref in all_refs for index in ref.indices}  # a dict, to keep their order
    return CodeRef(tuple(indices), max((ref.constant for ref in all_refs), default=FINITE))


def _worst(value: Any) -> int:
    """Returns the code of a constant in the program."""
    array = np.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return FINITE
    return NAN if np.isnan(array).any() else INFINITE if np.isinf(array).any() else FINITE


def _site(equation: Any, scopes: tuple[str, ...]) -> Site:
    named = tuple(scope for scope in scopes if scope != BACKWARD)
    return Site(named, equation.primitive.name, _line_of(equation), BACKWARD in scopes)


ITERATION = "{}"
"""The placeholder among the scopes for the number of a loop's iteration."""
BACKWARD = "(backward)"


def _scopes_of(equation: Any) -> tuple[str, ...]:
    """Returns the names that the program gave (`jax.named_scope`), without those of JAX's transformations; BACKWARD marks the
    backward pass."""
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

"""An update of the optimizer's state that may be refused, in place.

    updates, opt_state = kept_update(optimizer, applied, gradients, opt_state, params)

Where `applied` is false, the state stays as it was. A `where` around `optimizer.update` would do the same, but it computes the
updates from a state that the `where` has not seen. So the compiler copies the old state before it writes the new one: a second
state in memory, and two thirds of the time of an update of AdamW on a CPU.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, Literal, Var

from trainers.jax_internals import source_info_util


def kept_update(
    optimizer: optax.GradientTransformation, applied: jax.Array, gradients: Any, opt_state: Any, params: Any
) -> tuple[Any, Any]:
    """Returns (updates, the new state of the optimizer), as `optimizer.update` does. If `applied` (bool) is false, the state is
    the old one, bit for bit, and the caller must not use the updates. Traced."""
    program, shapes = jax.make_jaxpr(optimizer.update, return_shape=True)(gradients, opt_state, params)
    num_updates, old_leaves = len(jax.tree.leaves(shapes[0])), jax.tree.leaves(opt_state)
    atoms = program.jaxpr.outvars[num_updates:]
    early = _computed_once(program, dict(enumerate(atoms)))
    old_of = {atoms[place]: old_leaves[place] for place in early}
    outputs = _evaluated(program, jax.tree.leaves((gradients, opt_state, params)), applied, old_of)
    for place, old in enumerate(old_leaves):
        if place not in early:
            outputs[num_updates + place] = jnp.where(applied, outputs[num_updates + place], old)
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


def _computed_once(program: ClosedJaxpr, atoms: Mapping[int, Any]) -> set[int]:
    """Returns the keys of the atoms that an equation computes for this key alone. Others are inputs, such as parameters that the
    state keeps, or constants, or stand in two places of the state."""
    computed = {var for equation in program.jaxpr.eqns for var in equation.outvars}
    variables = {key: atom for key, atom in atoms.items() if not isinstance(atom, Literal) and atom in computed}
    uses = collections.Counter(variables.values())
    return {key for key, atom in variables.items() if uses[atom] == 1}


def _evaluated(
    program: ClosedJaxpr, arguments: Sequence[jax.Array], applied: jax.Array, old_of: Mapping[Var, jax.Array]
) -> list[jax.Array]:
    """Returns the outputs. If `applied` is false, a variable of `old_of` has the old value as soon as it is computed, and what
    follows is computed from that."""
    jaxpr = program.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *arguments], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        names = source_info_util.current_name_stack() + equation.source_info.name_stack
        with source_info_util.user_context(equation.source_info.traceback, name_stack=names), equation.ctx.manager:
            params = equation.primitive.get_bind_params(equation.params)
            found = equation.primitive.bind(*map(read, equation.invars), **params)
        outputs = found if equation.primitive.multiple_results else [found]
        for var, output in zip(equation.outvars, outputs, strict=True):
            values[var] = jnp.where(applied, output, old_of[var]) if var in old_of else output
    return [read(atom) for atom in jaxpr.outvars]

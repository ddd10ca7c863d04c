"""Which settings of `model` go together: what a family lacks in transformers is refused when it is configured, and not when the
model is exported. Free of JAX."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from trainers.config.families import FAMILIES, OPTIONAL

WHOLE_QUERY_SCALAR = ("gemma2", "gemma3")


def problems(model: Any) -> Iterator[str]:
    """Yields a line for each setting of a `ModelConfig` that its family has not, or needs, or has in another form."""
    if model.window is None:
        for name in ("global_every", "local_rope_theta"):
            if (value := getattr(model, name)) is not None:
                yield f"{name} = {value}: it is about layers with a window; set window too, or leave {name} out"
    if model.global_every == 1:
        yield "global_every = 1: then no layer has the window; leave out window and global_every"
    if model.family not in FAMILIES:
        return
    yield from _lacking(model)
    yield from _of_experts(model)
    yield from _of_shapes(model)
    if model.structure.positions == "learned" and model.num_positions is None:
        yield f"num_positions = null: the family {model.family} has learned positions; set how many"
    scalar = model.query_scalar
    if scalar is not None and scalar != int(scalar) and model.family in WHOLE_QUERY_SCALAR:
        yield f"query_scalar = {scalar}: the family {model.family} has a whole number"
    scaling = model.rope_scaling
    if scaling is not None and not scaling.truncate and _has_two_ropes(model):
        yield f"rope_scaling.truncate = false: the family {model.family} has none such; leave it out"
    if model.local_rope_theta is None and model.window is not None and model.rope_scaling is not None and _has_two_ropes(model):
        yield (
            f"local_rope_theta = null: rope_scaling is that of the layers without a window in the family {model.family}; set "
            f"local_rope_theta, the rope_theta of the others (such as 10000.0)"
        )


def _has_two_ropes(model: Any) -> bool:
    return "local_rope_theta" in model.structure.settings


def _lacking(model: Any) -> Iterator[str]:
    usual = {item.name: item.default for item in fields(model)}
    if "num_kv_heads" not in model.structure.settings and model.num_kv_heads != model.num_heads:
        yield f"num_kv_heads = {model.num_kv_heads}: the family {model.family} has as many as num_heads ({model.num_heads})"
    if "head_dim" not in model.structure.settings and model.head_dim not in (None, model.width // model.num_heads):
        yield f"head_dim = {model.head_dim}: the family {model.family} has width / num_heads ({model.width // model.num_heads})"
    for name in OPTIONAL:
        value = getattr(model, name)
        if name in (*model.structure.settings, "num_kv_heads", "head_dim") or value == usual[name]:
            continue
        shown = name if hasattr(value, "__dataclass_fields__") else f"{name} = {value}"
        having = ", ".join(family for family, structure in FAMILIES.items() if name in structure.settings)
        yield f"{shown}: the family {model.family} has none such; leave it out, or choose a family that has it ({having})"


def _of_experts(model: Any) -> Iterator[str]:
    if not model.structure.experts:
        return
    for name in ("num_experts", "experts_per_token"):
        if getattr(model, name) is None:
            yield f"{name} = null: the family {model.family} has experts; set how many"
    if model.fp8 != "none":
        yield (
            f"fp8 = {model.fp8!r}: the family {model.family} has experts, and their products (grouped_product) are not computed "
            "in 8 bits; leave it out"
        )
    if (model.experts_per_token or 0) > (model.num_experts or math.inf):
        yield f"experts_per_token = {model.experts_per_token}: expected at most num_experts ({model.num_experts})"
    if model.grouped_product != "xla" and ":" not in model.grouped_product:
        yield f"grouped_product = {model.grouped_product!r}: expected xla, or package.module:function"


def _of_shapes(model: Any) -> Iterator[str]:
    if model.structure.whole_heads and model.head_dim is not None and model.width % model.num_heads:
        yield (
            f"width = {model.width}: expected a multiple of num_heads ({model.num_heads}), for transformers loads no other model "
            f"of the family {model.family}, whatever head_dim is"
        )

"""What a decoder computes, layer by layer: the form in which a configuration of ours and a `config.json` are compared."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from trainers.config import ModelConfig
from trainers.config.model import MULTIPLIERS, RopeScaling


class Layer(NamedTuple):
    """The attention of a layer."""

    window: int | None
    rope_theta: float | None
    """None: it turns nothing."""
    rope_scaling: RopeScaling | None


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """All that the logits depend on but the weights, with no default left open."""

    family: str
    vocab_size: int
    width: int
    num_heads: int
    num_kv_heads: int
    channels: int
    mlp_width: int
    layers: tuple[Layer, ...]
    query_scalar: float
    """The scores of the attention are divided by its square root."""
    norm_eps: float
    tie_embeddings: bool
    num_positions: int | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    num_experts: int | None = None
    experts_per_token: int | None = None
    normalize_routing: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_divisor: float = 1.0


def of_model(config: ModelConfig) -> Meaning:
    """Returns what `trainers.models.decoder.Decoder` computes."""

    def layer(local: bool, turned: bool) -> Layer:
        window = config.window if local else None
        if not turned:
            return Layer(window, None, None)
        if local and config.local_rope_theta is not None:
            return Layer(window, config.local_rope_theta, None)
        return Layer(window, config.rope_theta, config.rope_scaling)

    named: dict[str, Any] = {item.name: getattr(config, item.name, None) for item in fields(Meaning)}
    named |= {name: getattr(config, name) or 1.0 for name in MULTIPLIERS}
    named["layers"] = tuple(map(layer, config.local_layers, config.turned_layers))
    named["query_scalar"] = config.query_scalar or config.channels
    return Meaning(**named)


def differences(found: Meaning, expected: Meaning) -> Iterator[str]:
    """Yields what differs, as `name = found, and not expected`."""
    for item in fields(Meaning):
        values: tuple[Any, Any] = getattr(found, item.name), getattr(expected, item.name)
        if values[0] != values[1] and not _nearly(*values):
            yield f"{item.name} = {values[0]}, and not {values[1]}"


def _nearly(one: Any, other: Any) -> bool:
    # Granite has another form of the scale: what is written and read again may differ in the last digit.
    return isinstance(one, int | float) and isinstance(other, int | float) and math.isclose(one, other, rel_tol=1e-12)

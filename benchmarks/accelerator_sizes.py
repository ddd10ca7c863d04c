"""What the accelerator protocol trains: a Llama of 1B for an accelerator, a tiny one for a test on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainers.config.arguments import TrainingArguments
from trainers.settings import recorded

LLAMA_1B = {
    **{"family": "llama", "vocab_size": 128_256, "width": 2048, "num_layers": 16, "num_heads": 32, "num_kv_heads": 8},
    **{"mlp_width": 8192, "rope_theta": 500_000.0, "tie_embeddings": True},
}
TINY = {"family": "llama", "width": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "mlp_width": 176}


@dataclass(frozen=True)
class Sizes:
    model: dict[str, Any]
    lengths: tuple[int, ...]
    """Tokens of a sequence."""
    tokens_per_device: int
    """Of a step."""
    steps: int
    publish_every_steps: int
    remat: str
    saved_millions: float
    """Parameters of the state whose save is timed."""
    save_rounds: int
    kernel_calls: int


LARGE = Sizes(LLAMA_1B, (2048, 8192), 16_384, 40, 5, "none", 400.0, 2, 10)
LITTLE_MEMORY = Sizes(LLAMA_1B, (2048, 8192), 8192, 40, 5, "full", 200.0, 2, 10)
SMALL = Sizes(TINY, (64,), 256, 8, 2, "none", 1.0, 1, 2)
ENOUGH_BYTES = 60e9
"""From this memory on, a device keeps the activations of 16,384 tokens of the model beside its state."""


def sizes_for(small: bool, device: dict[str, Any]) -> Sizes:
    """Returns the sizes for a device that was measured."""
    if small:
        return SMALL
    return LARGE if (device["memory_bytes"] or 0.0) >= ENOUGH_BYTES else LITTLE_MEMORY


def arguments(
    sizes: Sizes,
    devices: int,
    storage: str,
    *,
    name: str,
    length: int,
    packed: bool = False,
    overrides: tuple[str, ...] = (),
    **more: Any,
) -> TrainingArguments:
    """Returns the arguments of one run over `devices` devices. `overrides` are `key=value`, and come last."""
    settings = {
        "name": name,
        "storage": storage,
        "global_batch_size": devices * sizes.tokens_per_device // length,
        "max_num_steps": sizes.steps,
        "publish_every_steps": sizes.publish_every_steps,
        "dtype": "bfloat16",
        "mesh": {"data": 1, "fsdp": -1},
        "model": {**sizes.model, "remat": sizes.remat},
        "data": {
            **{"paths": ["python-stdlib"], "tokenizer": "bytes", "sequence_length": length, "eval_fraction": 0.0},
            "packing": "concat" if packed else None,
        },
        "optimizer": {"learning_rate": 3e-4},
        "evaluation": {"every_steps": None},
        "checkpoint": {"save_steps": None, "save_at_end": False},
        **more,
    }
    return recorded("the accelerator protocol", settings, overrides)

"""The sections for the model, its data, its loss, and the mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from trainers.config.section import Section, did_you_mean, require, require_none, too_small


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Section):
    """The sizes of the mesh axes over all devices of the run. One of them may be -1: it takes what is left."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self):
        sizes = dataclasses.asdict(self)
        for name, size in sizes.items():
            require(size == -1 or size >= 1, f"mesh axis {name} = {size}: expected a positive size, or -1 for what is left")
        require(list(sizes.values()).count(-1) <= 1, f"mesh {sizes}: at most one axis may be -1")

    def resolve(self, num_devices: int) -> dict[str, int]:
        """Returns the axis sizes for `num_devices` devices. Raises ValueError if they do not multiply to it."""
        sizes = dataclasses.asdict(self)
        fixed = 1
        for size in sizes.values():
            fixed *= size if size != -1 else 1
        shown = " x ".join(f"{name} {size}" for name, size in sizes.items())
        if num_devices % fixed or (-1 not in sizes.values() and fixed != num_devices):
            fits = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
            raise ValueError(
                f"mesh {shown} does not fit {num_devices} devices: the sizes must multiply to {num_devices} "
                f"(each a divisor: {', '.join(map(str, fits))}); set one axis to -1 to let it take what is left"
            )
        return {name: num_devices // fixed if size == -1 else size for name, size in sizes.items()}


REMAT = ("none", "full", "dots_saveable", "dots_with_no_batch_dims_saveable")
"""Values of `model.remat`; all but the first two are names of `jax.checkpoint_policies`."""


UNROLLED_LAYERS = 8
"""On a CPU, up to this many layers are compiled one by one, and more as a loop, as on an accelerator. One by one is 13 % faster
there. A loop compiles and loads in the same time for any depth."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    vocab_size: int = 256
    width: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 4
    mlp_width: int = 768
    # As in Su et al., 2021.
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    remat: str = "none"
    """The activations of a layer that are computed again in the backward pass, to save memory. `full`: all of them.
    `dots_saveable`: all but the products of matrices; `dots_with_no_batch_dims_saveable`: all but the products with weights.
    The results are the same up to rounding."""

    def __post_init__(self):
        require_none(too_small(self, 1, "vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "mlp_width"))
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        # Even, for rotary positions turn pairs of channels.
        if self.width % self.num_heads or (self.width // self.num_heads) % 2:
            yield f"width = {self.width}: expected an even number of channels for each of the {self.num_heads} heads (num_heads)"
        if self.num_heads % self.num_kv_heads:
            yield f"num_kv_heads = {self.num_kv_heads}: expected a divisor of num_heads ({self.num_heads})"
        if self.remat not in REMAT:
            yield f"remat = {self.remat!r}: expected one of {', '.join(REMAT)}{did_you_mean(self.remat, REMAT)}"
        if self.rope_theta <= 0:
            yield f"rope_theta = {self.rope_theta}: expected a positive number"

    def unrolled(self, platform: str) -> bool:
        """Returns whether the layers are compiled one by one on `platform` (`cpu`, `gpu` or `tpu`), and not as a loop."""
        # With checkpointing always a loop: of unrolled layers the compiler keeps the activations all the same.
        return platform == "cpu" and self.num_layers <= UNROLLED_LAYERS and self.remat == "none"


@dataclass(frozen=True, kw_only=True)
class LossConfig(Section):
    """Settings of the loss of the built-in tasks."""

    z_loss_weight: float = 0.0
    """The weight of the mean square of log Z, the logarithm of the sum of exp(logits), which keeps it near 0 (Chowdhery et al.,
    2022, section 5). 0: it is not computed."""

    label_smoothing: float = 0.0
    """The share of each target's probability that is spread evenly over the vocabulary (Szegedy et al., 2016, section 7). The
    published perplexity is then that of the smoothed loss."""
    ignore_index: int | None = None
    """Tokens with this id (of padding, say) are no targets: they count in no loss and no metric. null: every token is one."""

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 0, "z_loss_weight")
        if not 0 <= self.label_smoothing < 1:
            yield f"label_smoothing = {self.label_smoothing}: expected 0 <= label_smoothing < 1"
        if self.ignore_index is not None and self.ignore_index < 0:
            yield f"ignore_index = {self.ignore_index}: expected an id of the vocabulary, for targets are the model's input too"

"""What is trained, on which data, over which mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trainers.config.section import Section, not_paths, require, require_none, too_small


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Section):
    """Sizes of the mesh axes over all devices of the run; one of them may be -1: whatever is left."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self):
        sizes = dataclasses.asdict(self)
        for name, size in sizes.items():
            require(size == -1 or size >= 1, f"mesh axis {name} = {size}: expected a positive size, or -1 for what is left")
        require(list(sizes.values()).count(-1) <= 1, f"mesh {sizes}: at most one axis may be -1")

    def resolve(self, num_devices: int) -> dict[str, int]:
        """Axis sizes for `num_devices` devices. Raises ValueError when they do not multiply to it."""
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


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    vocab_size: int = 256
    width: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 4
    mlp_width: int = 768
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True

    def __post_init__(self):
        require_none(too_small(self, 1, "vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "mlp_width"))
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        if self.width % self.num_heads or (self.width // self.num_heads) % 2:
            yield f"width = {self.width}: expected an even number of channels for each of the {self.num_heads} heads (num_heads)"
        if self.num_heads % self.num_kv_heads:
            yield f"num_kv_heads = {self.num_kv_heads}: expected a divisor of num_heads ({self.num_heads})"
        if self.rope_theta <= 0:
            yield f"rope_theta = {self.rope_theta}: expected a positive number"


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Text as bytes, from files and folders. `dataset` names a function (arguments) -> (train, eval) to use another source."""

    dataset: str = "trainers.data.sources.text:byte_text"
    paths: tuple[str, ...] = ("python-stdlib",)
    """Files or folders; `python-stdlib` stands for the sources of the running Python's standard library."""
    pattern: str = "*.py"
    """Which files of a folder to read (a file named in `paths` is always read)."""
    sequence_length: int = 256
    eval_fraction: float = 0.05
    """The tail of the text that is held out."""
    shuffle: bool = True
    truncation: Literal["keep_start", "keep_end"] = "keep_start"
    """Which part of an example remains that is longer than `build_data_collate_info` allows."""
    sources: tuple[str, ...] = ()
    """Names of what the examples come from, if each has a leaf `source` with a place in this list: loss and tokens are then told
    of each."""

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from not_paths(self, "dataset")
        yield from too_small(self, 2, "sequence_length")
        if not self.paths:
            yield "paths = []: expected at least one file or folder"
        if len(set(self.sources)) < len(self.sources):
            yield f"sources = {list(self.sources)}: expected each name once"
        if not 0 <= self.eval_fraction < 1:
            yield f"eval_fraction = {self.eval_fraction}: expected 0 <= eval_fraction < 1"


@dataclass(frozen=True, kw_only=True)
class LossConfig(Section):
    """Of the tasks that are built in."""

    z_loss_weight: float = 0.0
    """Of the mean square of log Z, the logarithm of the sum of exp(logits), which keeps it near 0 (Chowdhery et al., 2022,
    section 5). 0: it is not computed."""

    def __post_init__(self):
        require_none(too_small(self, 0, "z_loss_weight"))

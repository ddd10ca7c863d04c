"""The section `vision`: an encoder of images, by itself or before a decoder. Free of JAX."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gangway.config.section import Section, require_none, too_small
from trainers.config.families import ENCODERS, Family, biased, misspelt
from trainers.config.model import ModelConfig, problems_of_remat, unrolled


@dataclass(frozen=True, kw_only=True)
class VisionConfig(Section):
    """An encoder of images of one of the families."""

    family: str = "vit"
    """`vit`: with a class token, for classification (Dosovitskiy et al., 2020). `siglip`: without one (Zhai et al., 2023)."""
    image_size: int = 224
    """The pixels of a side: images are squares."""
    patch_size: int = 16
    """The pixels of a side of a patch. Each patch is a token."""
    num_channels: int = 3
    """The colours of a pixel."""
    width: int = 768
    """The channels of the residual stream of the encoder."""
    num_layers: int = 12
    """Its layers."""
    num_heads: int = 12
    """The heads of each layer."""
    mlp_width: int = 3072
    """The inner width of the MLP."""
    norm_eps: float = 1e-6
    """What the norms add to the variance before its root."""
    num_labels: int | None = None
    """The classes of `vit`: the model has a head that scores them. null: it has none."""
    attention_pooling: bool = False
    """`siglip` has a head that makes one vector of all tokens by attention."""
    tokens_per_image: int | None = None
    """The tokens that an image has in a decoder (`trainers.models.vlm`): its patches are averaged to so many."""
    image_token: int | None = None
    """The token of the decoder's vocabulary that stands for a part of an image."""
    remat: str = "none"
    """As `model.remat`, but for `auto`."""

    def __post_init__(self):
        sizes = ("image_size", "patch_size", "num_channels", "width", "num_layers", "num_heads", "mlp_width", "num_labels")
        require_none([*too_small(self, 1, *sizes, "tokens_per_image"), *too_small(self, 0, "image_token")])
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        if self.family not in ENCODERS:
            yield f"family = {self.family!r}: expected one of {', '.join(ENCODERS)}{misspelt(self.family, ENCODERS)}"
        if self.image_size % self.patch_size:
            yield f"patch_size = {self.patch_size}: expected a divisor of image_size ({self.image_size})"
        if self.width % self.num_heads:
            yield f"num_heads = {self.num_heads}: expected a divisor of width ({self.width})"
        yield from problems_of_remat(self.remat)
        if self.num_labels is not None and self.family != "vit":
            yield f"num_labels = {self.num_labels}: family {self.family} has no head that scores classes; leave it out"
        if self.attention_pooling and self.family != "siglip":
            yield f"attention_pooling = true: family {self.family} has a class token in its place; leave it out"
        yield from self._problems_of_decoder()

    def _problems_of_decoder(self) -> Iterator[str]:
        tokens, token = self.tokens_per_image, self.image_token
        if (tokens is None) != (token is None):
            yield f"tokens_per_image = {tokens}, image_token = {token}: a decoder needs both; set both, or leave both out"
        if tokens is None:
            return
        if self.family != "siglip" or self.attention_pooling:
            yield f"tokens_per_image = {tokens}: expected family siglip without attention_pooling; a decoder reads all patches"
        side = math.isqrt(tokens)
        if side**2 != tokens or self.patches_per_side % side:
            allowed = [n**2 for n in range(1, self.patches_per_side + 1) if self.patches_per_side % n == 0]
            yield (
                f"tokens_per_image = {tokens}: expected one of {', '.join(map(str, allowed))}, the squares of the divisors of "
                f"{self.patches_per_side} patches a side"
            )

    @property
    def biased(self) -> frozenset[str]:
        """The names of a layer's matrices that have a bias."""
        return biased(self.structure)

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def num_tokens(self) -> int:
        """The tokens that the layers see: the patches, and the class token."""
        return self.patches_per_side**2 + (self.family == "vit")

    @property
    def structure(self) -> Family:
        return ENCODERS[self.family]

    @property
    def channels(self) -> int:
        """The channels of a head."""
        return self.width // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def num_experts(self) -> None:
        return None

    def unrolled(self, platform: str | None) -> bool:
        """Returns whether the layers are compiled one by one on `platform`, and not as a loop."""
        return unrolled(self.num_layers, self.remat, platform)


LayerSizes = ModelConfig | VisionConfig
"""What the layers of a decoder and of an encoder are made by."""

"""The sizes of the smallest model of images and text."""

from __future__ import annotations

from trainers.config import ModelConfig
from trainers.config.vision import VisionConfig

IMAGE = 0
"""The token of images is also what fills up a short prompt."""
MODEL = ModelConfig(
    family="gemma3",
    vocab_size=20,
    width=16,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    mlp_width=24,
    window=3,
    global_every=2,
    tie_embeddings=False,
)
VISION = VisionConfig(
    family="siglip",
    image_size=8,
    patch_size=2,
    width=8,
    num_layers=1,
    num_heads=2,
    mlp_width=16,
    tokens_per_image=4,
    image_token=IMAGE,
)

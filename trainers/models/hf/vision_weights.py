"""The weights of encoders of images, and of Gemma 3 with images, under the names of `transformers`."""

from __future__ import annotations

from functools import partial

from trainers.config.vision import VisionConfig
from trainers.models.hf.weights import Place


def _with_biases(turned: bool, **names: str) -> dict[str, Place]:
    """Returns the places of weights and their biases; the weights are matrices [out, in] there if `turned`."""
    weights = {ours: Place(f"{theirs}.weight", turned) for ours, theirs in names.items()}
    return weights | {f"{ours}_bias": Place(f"{theirs}.bias") for ours, theirs in names.items()}


_linear = partial(_with_biases, True)
_norm = partial(_with_biases, False)


VIT_LAYER = _norm(attention_norm="layernorm_before", mlp_norm="layernorm_after") | _linear(
    query="attention.attention.query",
    key="attention.attention.key",
    value="attention.attention.value",
    out="attention.output.dense",
    up="intermediate.dense",
    down="output.dense",
)
VIT_TOP = {
    "class_token": Place("embeddings.cls_token"),
    "positions": Place("embeddings.position_embeddings"),
    "patch": Place("embeddings.patch_embeddings.projection.weight"),
    "patch_bias": Place("embeddings.patch_embeddings.projection.bias"),
    **_norm(final_norm="layernorm"),
}
VIT_HEAD = _linear(head="classifier")
SIGLIP_LAYER = _norm(attention_norm="layer_norm1", mlp_norm="layer_norm2") | _linear(
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    out="self_attn.out_proj",
    up="mlp.fc1",
    down="mlp.fc2",
)
SIGLIP_TOP = {
    "positions": Place("embeddings.position_embedding.weight"),
    "patch": Place("embeddings.patch_embedding.weight"),
    "patch_bias": Place("embeddings.patch_embedding.bias"),
    **_norm(final_norm="post_layernorm"),
}
SIGLIP_POOLING = {
    "pooling.probe": Place("head.probe"),
    "pooling.query_key_value": Place("head.attention.in_proj_weight", turned=True),
    "pooling.query_key_value_bias": Place("head.attention.in_proj_bias"),
    **_linear(**{"pooling.out": "head.attention.out_proj", "pooling.up": "head.mlp.fc1", "pooling.down": "head.mlp.fc2"}),
    **_norm(**{"pooling.norm": "head.layernorm"}),
}
PROJECTOR = {
    "norm": Place("multi_modal_projector.mm_soft_emb_norm.weight"),
    "out": Place("multi_modal_projector.mm_input_projection_weight"),
}
ENCODER_PREFIXES = {"vit": ("vit.", ""), "siglip": ("vision_model.", "")}
"""Before the names of an encoder by itself: as in the files of the Hub, which are written like that, and the other ones that
there are."""
TOWER_PREFIXES = ("vision_tower.vision_model.", "vision_tower.", "model.vision_tower.vision_model.", "model.vision_tower.")
"""The same of the encoder in Gemma 3."""
TEXT_PREFIXES = ("language_model.model.", "model.language_model.")
PROJECTOR_PREFIXES = ("", "model.")
BESIDES = {"vit": ("pooler.", "vit.pooler."), "siglip": ("text_model.", "logit_scale", "logit_bias")}
"""What a file of an encoder may have besides, which is not read: of ViT a layer that only its pre-training used, and of SigLIP
the encoder of texts."""


def layer_places(config: VisionConfig) -> dict[str, Place]:
    return VIT_LAYER if config.family == "vit" else SIGLIP_LAYER


def layers_name(config: VisionConfig) -> str:
    return "encoder.layer" if config.family == "vit" else "encoder.layers"


def top_places(config: VisionConfig) -> dict[str, Place]:
    if config.family == "vit":
        return VIT_TOP
    return SIGLIP_TOP | (SIGLIP_POOLING if config.attention_pooling else {})

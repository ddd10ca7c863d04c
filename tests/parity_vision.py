"""Makes `tests/unit/data/parity_vision/`: tiny random encoders of images, a Gemma 3 and a Mistral Small, with what `transformers`
computes for them.

    make parity

It needs torch and transformers, as `tests/parity.py` does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTForImageClassification,
)

OUT = Path(__file__).parent / "unit" / "data" / "parity_vision"
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 4,
}
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "query_pre_attn_scalar": 12,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "bos_token_id": 1,
    "eos_token_id": None,
}
IMAGE_TOKEN, TOKENS_PER_IMAGE = 60, 9
ROWS, TIME = 2, 40


def main() -> None:
    for name in sys.argv[1:] or CASES:
        torch.manual_seed(0)
        folder = OUT / name
        expected = CASES[name](folder)
        save_file({key: np.ascontiguousarray(value) for key, value in expected.items()}, folder / "expected.safetensors")
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        (folder / "made_with.json").write_text(json.dumps(versions) + "\n")
        (folder / "generation_config.json").unlink(missing_ok=True)
        print(f"{name}: {sum(file.stat().st_size for file in folder.iterdir()) / 1024:.0f} KiB")


def vit(folder: Path) -> dict[str, np.ndarray]:
    model = saved(ViTForImageClassification(ViTConfig(**SMALL, num_labels=7, attn_implementation="eager")), folder)
    images = torch.randn(ROWS, 3, 24, 24)
    return {"images": channels_last(images), "logits": model(images).logits.detach().numpy()}


def siglip(folder: Path) -> dict[str, np.ndarray]:
    model = saved(SiglipVisionModel(SiglipVisionConfig(**SMALL, attn_implementation="eager")), folder)
    images = torch.randn(ROWS, 3, 24, 24)
    out = model(images)
    return {
        "images": channels_last(images),
        "hidden": out.last_hidden_state.detach().numpy(),
        "pooled": out.pooler_output.detach().numpy(),
    }


def gemma3(folder: Path) -> dict[str, np.ndarray]:
    """The first row has two images, one after the other but for two tokens; the second row has one, far from the beginning."""
    config = Gemma3Config(
        text_config=TEXT,
        vision_config=SMALL | {"hidden_size": 16, "intermediate_size": 24, "vision_use_head": False},
        mm_tokens_per_image=TOKENS_PER_IMAGE,
        image_token_id=IMAGE_TOKEN,
        boi_token_id=61,
        eoi_token_id=62,
        attn_implementation="eager",
    )
    model = saved(Gemma3ForConditionalGeneration(config), folder)
    tokens = torch.randint(2, 60, (ROWS, TIME))
    for row, start in ((0, 3), (0, 3 + TOKENS_PER_IMAGE + 2), (1, 20)):
        tokens[row, start : start + TOKENS_PER_IMAGE] = IMAGE_TOKEN
    images = torch.randn(3, 3, 24, 24)
    types = (tokens == IMAGE_TOKEN).long()
    with torch.no_grad():
        logits = model(input_ids=tokens, pixel_values=images, token_type_ids=types, use_cache=False).logits
    # [rows, images, H, W, C]: the second row has no second image.
    of_rows = np.zeros((ROWS, 2, 24, 24, 3), np.float32)
    of_rows[0], of_rows[1, 0] = channels_last(images[:2]), channels_last(images[2:])[0]
    return {"tokens": tokens.to(torch.int32).numpy(), "images": of_rows, "logits": logits.numpy()}


def mistral3(folder: Path) -> dict[str, np.ndarray]:
    """Of texts alone: its encoder is not read here."""
    named = ("query_pre_attn_scalar", "layer_types", "rope_parameters")
    config = Mistral3Config(
        text_config={**{key: value for key, value in TEXT.items() if key not in named}, "model_type": "mistral"},
        vision_config={
            **{"model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1},
            **{"num_attention_heads": 2, "head_dim": 4, "image_size": 8, "patch_size": 4},
        },
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = saved(Mistral3ForConditionalGeneration(config), folder)
    tokens = torch.randint(11, 64, (ROWS, TIME))
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    return {"tokens": tokens.to(torch.int32).numpy(), "logits": logits.numpy()}


CASES = {"vit": vit, "siglip": siglip, "gemma3": gemma3, "mistral3": mistral3}


def saved(model: Any, folder: Path) -> Any:
    model = model.float().eval()
    for parameter in model.parameters():
        # Larger than at the start of a training, and norms and biases too: so that every one of them matters.
        parameter.data.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def channels_last(images: torch.Tensor) -> np.ndarray:
    return images.permute(0, 2, 3, 1).numpy()


if __name__ == "__main__":
    main()

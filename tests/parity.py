"""Makes `tests/unit/data/parity/`: tiny random models of each family with the logits, losses, gradients and greedy tokens that
`transformers` computes for them; and `tests/unit/data/peft/`: adapters for some of them, as PEFT saves and computes them.

    make parity

It needs torch, transformers and peft, which nothing else here does: the Makefile gives it an environment of its own. The folders
are committed, so that the tests need none of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

OUT = Path(__file__).parent / "unit" / "data" / "parity"
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA = {"query_pre_attn_scalar": 12, "sliding_window": 6}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
    "llama3_1": ("llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}}),
    "llama_yarn_biases": (
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "beta_fast": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.25},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0], "mlp_bias": True}),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500_000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 16,
                    "attention_factor": 1.2,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": 6, "original_max_position_embeddings": 512}),
    "mistral": ("mistral", {"sliding_window": 6}),
    "ministral": ("ministral", {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma": ("gemma", {}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}),
    "qwen3": ("qwen3", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0}}),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": (
        "gemma3_text",
        GEMMA
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "gpt2": (
        "gpt2",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": None},
    ),
    "mixtral": ("mixtral", {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "moe_intermediate_size": 12,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
}
ROWS, TIME, PROMPT, NEW_TOKENS = 2, 40, 5, 12
PEFT_OUT = OUT.parent / "peft"
NEW_TOKENS = 3
ADAPTERS: dict[str, dict[str, Any]] = {
    "llama3": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    # What Phi-3 has in one matrix is one module: our two adapters of rank 2 are one of rank 4.
    "phi3": {
        "r": 2,
        "lora_alpha": 6,
        "target_modules": ["gate_up_proj", "o_proj"],
        "rank_pattern": {"gate_up_proj": 4},
        "alpha_pattern": {"gate_up_proj": 12},
    },
    # Queries, keys and values are one module: our three adapters of rank 2 are one of rank 6.
    "gpt2": {
        "r": 2,
        "lora_alpha": 6,
        "target_modules": ["c_attn", "mlp.c_proj"],
        "rank_pattern": {"c_attn": 6},
        "alpha_pattern": {"c_attn": 18},
        "fan_in_fan_out": True,
    },
}
"""By the name of the model in CASES."""
WITH_NEW_TOKENS: dict[str, dict[str, Any]] = {
    "llama3": {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "gemma": {
        **{"r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        "ensure_weight_tying": True,
    },
}
"""Those with tables that have rows for new tokens, and are trained whole: of a model with two tables, and of one with one."""


def main() -> None:
    torch.manual_seed(0)
    for name in sys.argv[1:] or CASES:
        kind, changes = CASES[name]
        settings = changes if kind == "gpt2" else SMALL | changes
        if kind == "qwen2":
            # Its attention has no setting for the channels of a head.
            del settings["head_dim"]
        make(name, AutoConfig.for_model(kind, **settings))
        if name in ADAPTERS:
            adapt(name, PEFT_OUT / name, **ADAPTERS[name])
        if name in WITH_NEW_TOKENS:
            adapt(name, PEFT_OUT / f"{name}_tokens", new_tokens=NEW_TOKENS, **WITH_NEW_TOKENS[name])
        print(f"{name}: {sum(file.stat().st_size for file in (OUT / name).iterdir()) / 1024:.0f} KiB")


def make(name: str, config: Any) -> None:
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():
        # Larger than at the start of a training, and norms and biases too: so that every one of them matters.
        parameter.data.add_(0.15 * torch.randn_like(parameter))
    folder = OUT / name
    model.save_pretrained(folder)
    tokens = torch.randint(2, config.vocab_size, (ROWS, TIME))
    has_experts = hasattr(config, "num_experts_per_tok")
    out = model(tokens, use_cache=False, **({"output_router_logits": True} if has_experts else {}))
    logits = out.logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, config.vocab_size), tokens[:, 1:].reshape(-1))
    loss.backward()
    # Under the names in the file: in memory the matrices of all experts are one tensor.
    gradients = revert_weight_conversion(model, {key: value.grad for key, value in model.named_parameters()})
    expected = {
        "tokens": tokens.to(torch.int32).numpy(),
        "logits": logits.detach().numpy(),
        "loss": loss.detach().numpy(),
        "greedy": greedy(model, tokens[:, :PROMPT]).to(torch.int32).numpy(),
    }
    if has_experts:
        expected["load_balancing_loss"] = out.aux_loss.detach().numpy()
    expected |= {f"gradient.{key}": sample(value.numpy()) for key, value in gradients.items()}
    save_file({key: np.ascontiguousarray(value) for key, value in expected.items()}, folder / "expected.safetensors")
    (folder / "made_with.json").write_text(
        json.dumps({"transformers": transformers.__version__, "torch": torch.__version__}) + "\n"
    )
    (folder / "generation_config.json").unlink(missing_ok=True)


def adapt(name: str, folder: Path, new_tokens: int = 0, **settings: Any) -> None:
    """Makes an adapter for a model that `make` has made, with the logits of both."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(OUT / name, attn_implementation="eager", dtype=torch.float32)
    vocabulary = 64 + new_tokens
    if new_tokens:
        model.resize_token_embeddings(vocabulary)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    for key, parameter in adapted.named_parameters():
        if "lora_B" in key:
            # Larger than 0, with which training begins: so that every number matters.
            random = 0.3 * torch.randn_like(parameter)
            parts = {"c_attn": 3, "gate_up_proj": 2}
            number = next((number for name, number in parts.items() if name in key), 1)
            parameter.data = random * blocks(parameter, number)
        elif "modules_to_save" in key:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    about = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": name}
    (folder / "adapter_config.json").write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")
    tokens = torch.randint(2, vocabulary, (ROWS, TIME))
    with torch.no_grad():
        logits = adapted(tokens, use_cache=False).logits
    expected = {"tokens": tokens.to(torch.int32).numpy(), "logits": logits.numpy()}
    save_file(expected, folder / "expected.safetensors")


def blocks(parameter: torch.Tensor, number: int) -> torch.Tensor:
    """Returns 1 where the outputs of one of the weights in a module meet their own part of the rank, else 0."""
    outputs, rank = parameter.shape
    return torch.block_diag(*[torch.ones(outputs // number, rank // number)] * number)


def sample(gradient: np.ndarray) -> np.ndarray:
    """Returns the norm, and some of the values: whole gradients would be as large as the models."""
    places = np.linspace(0, gradient.size - 1, min(gradient.size, 31)).astype(int)
    return np.concatenate([[np.linalg.norm(gradient)], gradient.ravel()[places]]).astype(np.float32)


@torch.no_grad()
def greedy(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Without a cache: what the model itself says, token by token."""
    for _ in range(NEW_TOKENS):
        tokens = torch.cat([tokens, model(tokens, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return tokens[:, PROMPT:]


if __name__ == "__main__":
    main()

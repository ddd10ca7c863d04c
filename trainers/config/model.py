"""The section `model`: a decoder. Free of JAX."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from gangway.config.conversion import convert_sections
from gangway.config.section import Section, did_you_mean, not_positive, require, require_none, too_small
from trainers.config.attention import EXCHANGES, KERNELS
from trainers.config.families import FAMILIES, OPTIONAL, Family, biased, misspelt

WHOLE_QUERY_SCALAR = ("gemma2", "gemma3")


def problems(model: Any) -> Iterator[str]:
    """Yields a line for each setting of a `ModelConfig` that its family has not, or needs, or has in another form."""
    if model.window is None:
        for name in ("global_every", "local_rope_theta"):
            if (value := getattr(model, name)) is not None:
                yield f"{name} = {value}: it is about layers with a window; set window too, or leave {name} out"
    if model.global_every == 1:
        yield "global_every = 1: then no layer has the window; leave out window and global_every"
    if model.family not in FAMILIES:
        return
    yield from _lacking(model)
    yield from _of_experts(model)
    if model.structure.whole_heads and model.head_dim is not None and model.width % model.num_heads:
        yield (
            f"width = {model.width}: expected a multiple of num_heads ({model.num_heads}), for transformers loads no other model "
            f"of the family {model.family}, whatever head_dim is"
        )
    if model.structure.positions == "learned" and model.num_positions is None:
        yield f"num_positions = null: the family {model.family} has learned positions; set how many"
    scalar = model.query_scalar
    if scalar is not None and scalar != int(scalar) and model.family in WHOLE_QUERY_SCALAR:
        yield f"query_scalar = {scalar}: the family {model.family} has a whole number"
    scaling = model.rope_scaling
    if scaling is not None and not scaling.truncate and model.structure.has_two_ropes:
        yield f"rope_scaling.truncate = false: the family {model.family} has none such; leave it out"
    if model.local_rope_theta is None and model.window is not None and scaling is not None and model.structure.has_two_ropes:
        yield (
            f"local_rope_theta = null: rope_scaling is that of the layers without a window in the family {model.family}; set "
            f"local_rope_theta, the rope_theta of the others (such as 10000.0)"
        )


def _lacking(model: Any) -> Iterator[str]:
    usual = {item.name: item.default for item in fields(model)}
    if "num_kv_heads" not in model.structure.settings and model.num_kv_heads != model.num_heads:
        yield f"num_kv_heads = {model.num_kv_heads}: the family {model.family} has as many as num_heads ({model.num_heads})"
    if "head_dim" not in model.structure.settings and model.head_dim not in (None, model.width // model.num_heads):
        yield f"head_dim = {model.head_dim}: the family {model.family} has width / num_heads ({model.width // model.num_heads})"
    for name in OPTIONAL:
        value = getattr(model, name)
        if name in (*model.structure.settings, "num_kv_heads", "head_dim") or value == usual[name]:
            continue
        shown = name if hasattr(value, "__dataclass_fields__") else f"{name} = {value}"
        having = ", ".join(family for family, structure in FAMILIES.items() if name in structure.settings)
        yield f"{shown}: the family {model.family} has none such; leave it out, or choose a family that has it ({having})"


def _of_experts(model: Any) -> Iterator[str]:
    if not model.structure.experts:
        return
    for name in ("num_experts", "experts_per_token"):
        if getattr(model, name) is None:
            yield f"{name} = null: the family {model.family} has experts; set how many"
    if model.fp8 != "none":
        yield (
            f"fp8 = {model.fp8!r}: the family {model.family} has experts, and their products (grouped_product) are not computed "
            "in 8 bits; leave it out"
        )
    if (model.experts_per_token or 0) > (model.num_experts or math.inf):
        yield f"experts_per_token = {model.experts_per_token}: expected at most num_experts ({model.num_experts})"
    if model.grouped_product != "xla" and ":" not in model.grouped_product:
        yield f"grouped_product = {model.grouped_product!r}: expected xla, or package.module:function"


REMAT = (
    *("none", "full", "dots_saveable", "dots_with_no_batch_dims_saveable", "save_dot_except_mlp", "save_qkv_proj"),
    *("minimal_offloaded", "qkv_proj_offloaded"),
)
"""Values of `model.remat` that say what is kept: names of `jax.checkpoint_policies`, and policies of MaxText."""
TO_HOST = ("minimal_offloaded", "qkv_proj_offloaded")
"""Those that keep it in the memory of the devices' hosts."""
AUTO = "auto"
"""The value of `model.remat` that leaves the choice to the run."""
CHOICES = ("none", "dots_with_no_batch_dims_saveable", "save_dot_except_mlp", "full")
"""Among which `auto` chooses: each keeps less than the one before, and computes more again. To try one takes a compilation."""
REMAT_OF_OTHERS = {
    **dict.fromkeys(("minimal", "minimal_with_context"), "dots_with_no_batch_dims_saveable"),
    **dict.fromkeys(("save_dot_except_mlpwi", "save_dot_with_context_except_mlp", "save_out_proj"), "save_dot_except_mlp"),
}
"""Policies of MaxText that keep as much as one of ours, or a little more or less: our name of it."""


MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logit_divisor")


OF_EXECUTION = ("remat", "attention", "context_attention", "grouped_product", "fp8")
"""Keys of `model` that say how a model is computed, and not which model it is."""

FP8 = ("none", "current")
"""Values of `model.fp8`."""

UNROLLED_LAYERS = 8
"""On a CPU, up to this many layers are compiled one by one, and more as a loop, as on an accelerator. One by one is 13 % faster
there. A loop compiles and loads in the same time for any depth."""


USED_BY_SCALING = {
    "linear": {"kind", "factor"},
    "llama3": {"kind", "factor", "low_freq_factor", "high_freq_factor", "original_length"},
    "yarn": {"kind", "factor", "original_length", "beta_fast", "beta_slow", "truncate", "attention_factor"},
}


@dataclass(frozen=True, kw_only=True)
class RopeScaling(Section):
    """How rotary positions are stretched for texts that are longer than those a model was first trained on."""

    kind: Literal["linear", "llama3", "yarn"] = "llama3"
    """`linear`: all angles are divided by `factor` (Chen et al., 2023). `llama3`: only those that turn slowly are, and those
    between change over smoothly, as in Llama 3.1. `yarn`: they change over by the number of their channel, and queries and keys
    are multiplied by `attention_factor` (Peng et al., 2023)."""
    factor: float = 8.0
    """By how much the angles are divided: about how many times longer the texts may be."""
    low_freq_factor: float = 1.0
    """Of `llama3`: channels that turn less often than this within `original_length` are divided by `factor`."""
    high_freq_factor: float = 4.0
    """Of `llama3`: channels that turn more often than this stay as they are."""
    original_length: int = 8192
    """Of `llama3` and `yarn`: the length of the texts of the first training, in tokens."""
    beta_fast: float = 32.0
    """Of `yarn`: channels that turn more often than this within `original_length` stay as they are."""
    beta_slow: float = 1.0
    """Of `yarn`: channels that turn less often than this within `original_length` are divided by `factor`."""
    truncate: bool = True
    """Of `yarn`: the numbers of the channels at these two places are made whole, away from each other."""
    attention_factor: float | None = None
    """Of `yarn`. null: 0.1 ln(factor) + 1."""

    def __post_init__(self):
        require_none(too_small(self, 1, "factor", "original_length"))
        require_none(
            f"{item.name} = {getattr(self, item.name)}: {self.kind} does not use it; leave it out"
            for item in fields(self)
            if item.name not in USED_BY_SCALING[self.kind] and getattr(self, item.name) != item.default
        )
        require(
            0 < self.low_freq_factor < self.high_freq_factor,
            f"low_freq_factor = {self.low_freq_factor}: expected more than 0 and less than high_freq_factor "
            f"({self.high_freq_factor})",
        )
        require(
            0 < self.beta_slow < self.beta_fast,
            f"beta_slow = {self.beta_slow}: expected more than 0 and less than beta_fast ({self.beta_fast})",
        )
        factor = self.attention_factor
        require(factor is None or factor > 0, f"attention_factor = {factor}: expected a positive number")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """A decoder of one of the families."""

    pretrained: str | None = None
    """A folder of Hugging Face. The model is the one that its `config.json` describes, and begins with its weights (`init_from`).
    It says all keys of this section but `remat`, `attention`, `context_attention`, `grouped_product` and `fp8`."""
    family: str = "llama"
    """The structure: `llama`, `mistral`, `ministral`, `qwen2`, `qwen3`, `gemma`, `gemma2`, `gemma3`, `granite`, `smollm3`,
    `olmo2`, `olmo3`, `phi3`, `gpt2`, `mixtral` or `qwen3_moe`. The other keys are its numbers."""
    vocab_size: int = 256
    """The tokens of the vocabulary. The tokenizer may have no more."""
    width: int = 256
    """The channels of the residual stream."""
    num_layers: int = 4
    """The layers, each an attention and an MLP."""
    num_heads: int = 4
    """The heads of queries of each layer."""
    num_kv_heads: int = 4
    """The heads of keys and values. Fewer than `num_heads`: several queries share one (GQA, Ainslie et al., 2023)."""
    head_dim: int | None = None
    """The channels of a head. null: `width` / `num_heads`."""
    mlp_width: int = 768
    """The inner width of the MLP; in a mixture of experts, of each expert."""
    num_experts: int | None = None
    """The experts of each layer of `mixtral` and `qwen3_moe`."""
    experts_per_token: int | None = None
    """How many of them each token goes to."""
    normalize_routing: bool = True
    """The shares of a token's experts are divided by their sum. Else they are the probabilities that the router gives them."""
    grouped_product: str = "xla"
    """The product of the experts' tokens with their matrices. `xla`: `jax.lax.ragged_dot`. `package.module:function`: a function
    of the same arguments (tokens [m, k], matrices [experts, k, n], tokens of each expert [experts]), such as
    `tokamax:ragged_dot`."""
    # As in Su et al., 2021.
    rope_theta: float = 10_000.0
    """The base of the angles of rotary positions. Larger for longer texts."""
    rope_scaling: RopeScaling | None = None
    """null: rotary positions are not stretched."""
    local_rope_theta: float | None = None
    """The `rope_theta` of layers with a window, to which `rope_scaling` does not apply. null: that of the others."""
    unturned_every: int | None = None
    """Every so manieth layer has no rotary positions (NoPE, Kazemnejad et al., 2023). null: all have them."""
    num_positions: int | None = None
    """The learned positions of `gpt2`: no sequence may be longer."""
    window: int | None = None
    """A token attends to so many tokens, including itself. null: to all before it."""
    global_every: int | None = None
    """Every so manieth layer attends to all tokens in spite of `window`. null: none does."""
    query_scalar: float | None = None
    """The scores of the attention are divided by its square root. null: `head_dim`."""
    attention_softcap: float | None = None
    """The scores of the attention are kept within +-`attention_softcap` by a tanh."""
    logit_softcap: float | None = None
    """The logits are kept within +-`logit_softcap` by a tanh."""
    attention_bias: bool = False
    """Queries, keys, values and the output of the attention have a bias."""
    mlp_bias: bool = False
    """The matrices of the MLP have a bias."""
    embedding_multiplier: float | None = None
    """Embeddings are multiplied by it."""
    residual_multiplier: float | None = None
    """What the attention and the MLP add is multiplied by it."""
    logit_divisor: float | None = None
    """The logits are divided by it."""
    norm_eps: float = 1e-5
    """What the norms add to the mean square (or the variance) before its root."""
    tie_embeddings: bool = True
    """Whether the table of embeddings is also the matrix that gives the logits."""
    remat: str = "none"
    """The activations of a layer that are computed again in the backward pass, to save memory. `full`: all of them. `auto`: as
    few as the memory of the devices allows; it is chosen when the step is first compiled, and kept with the run. The other names
    say what is kept (`docs/models.md`, Memory). The results are the same up to rounding."""
    attention: str = "auto"
    """What computes the attention: `xla` (all scores in memory), `blockwise` (those of a few tokens at a time), `cudnn` (GPUs),
    `splash` (TPUs), or `package.module:function` (`trainers.models.attention_kernels.Kernel`). `auto`: by platform, length and
    model; the dry run says which, and why. The results are the same up to rounding."""
    context_attention: str = "auto"
    """How the devices of `mesh.context` get the keys and values of each other's tokens. `gather`: all at once, in each layer.
    `ring`: those of one device after the other, while the attention to the last ones is computed. `auto`: by platform and length;
    the dry run says which, and why. The results are the same up to rounding."""
    fp8: str = "none"
    """The products of the layers' linear weights in training. `none`: in `dtype`. `current`: of operands that are rounded to 8
    bits, e4m3 forward, and e5m2 for the incoming gradients (Micikevicius et al., 2022), each divided by its current largest
    magnitude. Evaluations, previews and exports use the weights as they are."""

    def __post_init__(self):
        require_none(
            too_small(
                self,
                1,
                *("vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_width"),
                *("num_positions", "window", "global_every", "num_experts", "experts_per_token", "unturned_every"),
            )
        )
        require_none([*convert_sections(self), *self._problems()])

    def _problems(self) -> Iterator[str]:
        if self.pretrained is not None:
            defaults = ((item, item.default) for item in fields(self) if item.name not in ("pretrained", *OF_EXECUTION))
            for item, default in defaults:
                if (value := getattr(self, item.name)) != default:
                    yield f"{item.name} = {value}: the folder of pretrained says it; leave it out"
        if self.family not in FAMILIES:
            yield f"family = {self.family!r}: expected one of {', '.join(FAMILIES)}{misspelt(self.family, FAMILIES)}"
        # Even, for rotary positions turn pairs of channels.
        if self.head_dim is not None and self.head_dim % 2:
            yield f"head_dim = {self.head_dim}: expected an even number of channels"
        elif self.head_dim is None and self.width % (2 * self.num_heads):
            yield f"width = {self.width}: expected an even number of channels for each of the {self.num_heads} heads (num_heads)"
        if self.num_heads % self.num_kv_heads:
            yield f"num_kv_heads = {self.num_kv_heads}: expected a divisor of num_heads ({self.num_heads})"
        yield from problems_of_remat(self.remat, (*REMAT, AUTO))
        if self.attention not in KERNELS and ":" not in self.attention:
            expected = f"expected one of {', '.join(KERNELS)}, or package.module:function"
            yield f"attention = {self.attention!r}: {expected}{did_you_mean(self.attention, KERNELS)}"
        for name, known in (("context_attention", EXCHANGES), ("fp8", FP8)):
            if (chosen := getattr(self, name)) not in known:
                yield f"{name} = {chosen!r}: expected one of {', '.join(known)}{did_you_mean(chosen, known)}"
        positive = ("rope_theta", "local_rope_theta", "query_scalar", "attention_softcap", "logit_softcap", *MULTIPLIERS)
        yield from not_positive(self, *positive)
        yield from problems(self)

    @property
    def structure(self) -> Family:
        return FAMILIES[self.family]

    @property
    def biased(self) -> frozenset[str]:
        """The names of a layer's matrices that have a bias."""
        return biased(self.structure, attention=self.attention_bias, mlp=self.mlp_bias)

    @property
    def channels(self) -> int:
        """The channels of a head."""
        return self.head_dim if self.head_dim is not None else self.width // self.num_heads

    @property
    def idle_parameters(self) -> int:
        """The parameters of the experts that a token does not go to."""
        if self.num_experts is None or self.experts_per_token is None:
            return 0
        matrices = 3 if self.structure.gated else 2
        return self.num_layers * (self.num_experts - self.experts_per_token) * matrices * self.width * self.mlp_width

    @property
    def local_layers(self) -> tuple[bool, ...]:
        """Returns for each layer whether its attention has the window."""
        has_window = self.window is not None
        return all_but_every(self.global_every, self.num_layers) if has_window else (False,) * self.num_layers

    @property
    def turned_layers(self) -> tuple[bool, ...]:
        """Returns for each layer whether it has rotary positions."""
        is_rotary = self.structure.positions == "rotary"
        return all_but_every(self.unturned_every, self.num_layers) if is_rotary else (False,) * self.num_layers

    def unrolled(self, platform: str | None, remat: str | None = None) -> bool:
        """Returns whether the layers are compiled one by one on `platform` (`cpu`, `gpu` or `tpu`), and not as a loop. `remat`:
        what was chosen, where `model.remat` is `auto`."""
        return unrolled(self.num_layers, remat or self.remat, platform)


def all_but_every(every: int | None, num_layers: int) -> tuple[bool, ...]:
    """Returns False for every so manieth layer, and True for the others; None: True for all."""
    return tuple(every is None or (layer + 1) % every != 0 for layer in range(num_layers))


def problems_of_remat(remat: str, known: Sequence[str] = REMAT) -> Iterator[str]:
    if remat not in known:
        near = f"; did you mean {REMAT_OF_OTHERS[remat]}?" if remat in REMAT_OF_OTHERS else did_you_mean(remat, known)
        yield f"remat = {remat!r}: expected one of {', '.join(known)}{near}"


def unrolled(num_layers: int, remat: str, platform: str | None) -> bool:
    # With checkpointing always a loop: of unrolled layers the compiler keeps the activations all the same.
    return platform == "cpu" and num_layers <= UNROLLED_LAYERS and remat == "none"

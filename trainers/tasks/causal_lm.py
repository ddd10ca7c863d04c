"""The task of predicting the next token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from gangway.errors import UsageError
from trainers.config import ModelConfig
from trainers.config.arguments import TrainingArguments
from trainers.models.decoder import Decoder, Hidden
from trainers.models.experts import RouterLosses, router_losses
from trainers.models.hf.pretrained import decoder_in, is_there
from trainers.protocol import METRIC, SKIPPED, Batch, Ids, Loss
from trainers.tasks.cross_entropy import TokenLosses, from_hidden, from_logits
from trainers.text import tokenizers
from trainers.text.tokenizers import Tokenizer

NO_LABEL = -100
"""In `labels`: the token is no target."""
FOR_ALL = ("sample_id", "source", SKIPPED)
"""Leaves that the loop reads, of any task."""


@runtime_checkable
class HasHidden(Protocol):
    """A model whose logits need not all be computed at once. `trainers.models.decoder.Decoder` is one."""

    def hidden(self, tokens: jax.Array) -> Hidden:
        """Returns what the logits of int32 tokens [B, T] are computed from."""


class Packed(NamedTuple):
    """Of the inputs of packed rows, [B, T] each."""

    segments: jax.Array
    positions: jax.Array
    has_target: jax.Array
    """Whether the next token is of the same document."""


def packing_of(batch: Batch) -> Packed | None:
    """Returns which tokens of a batch belong together; None: its rows are not packed. Raises UsageError for half of what packed
    rows have."""
    if "segments" not in batch:
        return None
    if "positions" not in batch:
        raise UsageError(
            "the rows have a leaf `segments` and no `positions`: expected both, of the same shape; `positions` counts the tokens "
            "of each document from 0"
        )
    segments, following = batch["segments"][:, :-1], batch["segments"][:, 1:]
    return Packed(segments, batch["positions"][:, :-1], (segments == following) & (following != 0))


def inputs_of(model: nnx.Module, packed: Packed | None) -> dict[str, jax.Array]:
    """Returns what `hidden` of a model gets beside its tokens, so that documents of one row do not see each other. Raises
    UsageError for a model that cannot keep them apart."""
    if packed is None:
        return {}
    if not isinstance(model, Decoder):
        raise UsageError(
            f"the rows are packed (a leaf `segments`), and {type(model).__name__} cannot keep their documents apart: "
            "expected a trainers.models.decoder.Decoder; leave out data.packing, or override `loss` in the task"
        )
    return {"positions_BT": packed.positions, "segments_BT": packed.segments}


def check_leaves(task: Any, batch: Batch, of: type) -> None:
    """Raises UsageError for leaves of a batch that a task with the loss of the class `of` does not read (`reads`)."""
    if type(task).loss is not of.loss:  # type: ignore[attr-defined]
        return
    unread = [name for name in batch if name not in task.reads and not name.startswith(METRIC)]
    if unread:
        raise UsageError(
            f"nothing reads the columns {', '.join(unread)} of the examples: {type(task).__name__} reads "
            f"{', '.join(sorted(task.reads))}; if that is right, set data.ignore_columns=[{', '.join(unread)}]"
        )


def labelled(batch: Batch, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (the targets, the weights [B, T]) of a batch with `labels`. Raises UsageError for labels of another shape."""
    labels, tokens = batch["labels"], batch["tokens"]
    if labels.shape != tokens.shape:
        raise UsageError(f"labels has the shape {labels.shape}, and tokens {tokens.shape}: expected a label for each token")
    is_target = labels[:, 1:] != NO_LABEL
    # Where there is no label, any target will do: it has the weight 0.
    return jnp.where(is_target, labels[:, 1:], tokens[:, 1:]), jnp.where(is_target, weight, 0.0)


def weights_of(batch: Batch) -> tuple[jax.Array, Packed | None]:
    """Returns (how much each target of a batch counts, [B, T]; which tokens belong together, as `packing_of`)."""
    rows, places = batch["tokens"].shape
    # Rows of padding have weight 0, so none of their tokens is a target.
    weight = jnp.broadcast_to(batch["weight"][:, None], (rows, places - 1))
    if "token_weight" in batch:
        # A token's weight counts where it is the target, which the first token never is.
        weight = weight * batch["token_weight"][:, 1:]
    packed = packing_of(batch)
    return weight if packed is None else jnp.where(packed.has_target, weight, 0.0), packed


class CausalLMTask:
    """Predicts each next token. `batch` is {"tokens": int32[B, T + 1], "weight": float32[B]}: each of the first T tokens
    predicts its successor.

    A leaf `token_weight` (float32[B, T + 1], such as the mask of padding) says how much each token counts as a target. Of packed
    rows, `segments` (int32[B, T + 1]; 0 is filling) numbers the documents, and `positions` the tokens of each: a token sees its
    own document alone, and the first token of a document is no target.

    A leaf `labels` (int32[B, T + 1]) has the targets in the place of `tokens`: label i is what the model is to say in the place
    of token i, and -100 says that it is no target. Any other leaf is an error: nothing would read it.
    """

    reads: frozenset[str] = frozenset({"tokens", "weight", "token_weight", "segments", "positions", "labels", *FOR_ALL})
    """The leaves of a batch that it has a use for."""
    predicts = "texts"
    """What a model in MLflow answers with (`trainers.pyfunc`)."""

    def __init__(self, arguments: TrainingArguments):
        self.arguments = arguments
        if problems := list(self._problems()):
            raise UsageError("\n".join(problems))

    def _problems(self) -> Iterator[str]:
        loss = self.arguments.loss
        weights = {"load_balancing_weight": loss.load_balancing_weight, "router_z_loss_weight": loss.router_z_loss_weight}
        if not any(weights.values()) or not self._is_of_settings:
            return
        model = self.arguments.model
        for name, value in weights.items():
            if value and model.num_experts is None and model.pretrained is None:
                yield f"loss.{name} = {value}: a model of the family {model.family} has no experts; leave it out"

    @property
    def ids(self) -> dict[str, Ids]:
        """The ids that the leaves of a batch may have: those of the model's vocabulary. {}: it is a model of a subclass."""
        number = self.arguments.model.vocab_size
        return {"tokens": Ids(number), "labels": Ids(number, frozenset({NO_LABEL}))} if self._is_of_settings else {}

    @property
    def _is_of_settings(self) -> bool:
        """Whether the model is the one of the settings, and not of a subclass."""
        return type(self).build_model is CausalLMTask.build_model

    def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
        return Decoder(self.arguments.model, rngs=rngs, dtype=self.arguments.dtype, param_dtype=self.arguments.param_dtype)

    def build_frozen(self, name: str, rngs: nnx.Rngs) -> nnx.Module:
        """Returns the decoder of the folder of Hugging Face that `frozen.NAME.path` names; else one like that which is
        trained."""
        arguments, path = self.arguments, self.arguments.frozen[name].path
        model = arguments.model
        if is_there(path):
            model = decoder_in(path, model, f"frozen.{name}")
        return Decoder(model, rngs=rngs, dtype=arguments.dtype, param_dtype=arguments.param_dtype)

    def loss(self, model: nnx.Module, batch: Batch) -> Loss:
        check_leaves(self, batch, CausalLMTask)
        # [B, T] each: the targets are the inputs, one place further on.
        tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        config = self.arguments.loss
        weight, packed = weights_of(batch)
        if "labels" in batch:
            targets, weight = labelled(batch, weight)
        if config.ignore_index is not None:
            weight = jnp.where(targets == config.ignore_index, 0.0, weight)
        num_targets = jnp.sum(weight)
        (losses, hits, z_losses), router = self._token_losses(model, tokens, targets, weight, packed)
        parts = {"accuracy": (jnp.sum(hits * weight), num_targets)}
        if config.z_loss_weight:
            parts["z_loss"] = (jnp.sum(z_losses * weight), num_targets)
        # [B] each.
        tokens_B = jnp.sum(weight > 0, axis=1)
        rows = (jnp.sum(losses * weight, axis=1), jnp.sum(weight, axis=1), tokens_B)
        loss_sum = jnp.sum(losses * weight)
        if router is not None:
            # By targets, like all else: a micro-batch counts for as much as it has of them.
            loss_sum += num_targets * sum(router.losses.values())
            parts |= {name: (num_targets * value, num_targets) for name, value in (router.losses | router.load).items()}
        return Loss(loss_sum, num_targets, parts, jnp.sum(tokens_B), rows=rows)

    def _token_losses(
        self, model: nnx.Module, tokens: jax.Array, targets: jax.Array, weight: jax.Array, packed: Packed | None
    ) -> tuple[TokenLosses, RouterLosses | None]:
        config, about = self.arguments.loss, inputs_of(model, packed)
        if isinstance(model, Decoder) and model.config.num_experts is not None:
            about["counted_BT"] = weight
        if isinstance(model, HasHidden):
            hidden = model.hidden(tokens, **about)
            router = None if hidden.router is None else router_losses(hidden.router, config)
            return from_hidden(hidden, targets, config), router
        # A model of a subclass may have nothing but its logits.
        return from_logits(model(tokens), targets, config), None

    def check_rows(self, shapes: Mapping[str, Any]) -> None:
        """Raises UsageError for rows of data of one's own that have another length than the settings say."""
        length = self.arguments.data.sequence_length
        # The last one is a target alone.
        found = shapes["tokens"].shape[-1] if "tokens" in shapes else length + 1
        if found != length + 1:
            raise UsageError(
                f"the rows of the training data have {found} tokens, and data.sequence_length = {length} is for {length + 1}, by "
                f"which tokens and FLOPs are counted: set data.sequence_length={found - 1}, or give other rows"
            )

    @property
    def tokens_per_example(self) -> int:
        return self.arguments.data.sequence_length

    def flops_per_token(self, num_parameters: int) -> float:
        """Returns 6 N + 12 A D over the layers: each parameter that a token uses multiplies and adds once forward and twice
        backward; attention has two products of width D with the A tokens that a token attends to on average (Chowdhery et al.,
        2022, appendix B): T / 2, or W - W^2 / 2T with a window of W. A table that is only looked up multiplies nothing, nor do
        the experts that a token does not go to."""
        model = self.arguments.model
        looked_up = (0 if model.tie_embeddings else model.vocab_size) + (model.num_positions or 0)
        return flops_of_decoder(model, self.arguments.data.sequence_length, num_parameters - looked_up * model.width)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        return self.tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens."""
        return self.tokenizer.decode(tokens)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = tokenizers.of(self.arguments)
        tokenizers.check(tokenizer, self.arguments)
        return tokenizer


def flops_of_decoder(model: ModelConfig, time: int, num_parameters: int) -> float:
    """Returns the operations for each token of texts of `time` tokens, as `CausalLMTask.flops_per_token` counts them. Of
    `num_parameters`, tables that are only looked up are no part."""
    window = min(model.window or time, time)
    attended = [window - window**2 / (2 * time) if local else time / 2 for local in model.local_layers]
    return 6.0 * (num_parameters - model.idle_parameters) + 12.0 * sum(attended) * model.num_heads * model.channels

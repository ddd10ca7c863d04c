"""What the tasks that score whole texts have in common, and their decoder, which gives scores of a text in place of the logits of
its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from gangway.errors import UsageError
from trainers.config import ModelConfig
from trainers.config.arguments import TrainingArguments
from trainers.models.decoder import TABLE_SCALE, Decoder
from trainers.models.layers import parameter
from trainers.parallel.sequence import filled_up
from trainers.protocol import Batch, Ids
from trainers.tasks.causal_lm import CausalLMTask, flops_of_decoder
from trainers.tasks.segments import lines_of

OWN_PARAMETERS = ("^head$", "^unembed$")
"""Patterns of the parameters in which it differs from a decoder: it has a head, and no table for logits."""


class Segments(NamedTuple):
    """The texts that share rows, as `Decoder.hidden` takes them. A row has at most `number` of them."""

    segments_BT: jax.Array
    positions_BT: jax.Array
    number: int


class ScoringDecoder(Decoder):
    """A decoder with a linear head on the last token of each text."""

    def __init__(self, config: ModelConfig, num_scores: int, *, rngs: nnx.Rngs, dtype: Any, param_dtype: Any):
        super().__init__(config, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        if not config.tie_embeddings:
            del self.unembed
        self.head = parameter(rngs, ("embed", None), (config.width, num_scores), TABLE_SCALE, param_dtype)

    def scores(self, tokens_BT: jax.Array, token_weight_BT: jax.Array, of: Segments | None = None) -> jax.Array:
        """Returns float32[B, scores], from the last token of each row whose weight is more than 0; or with segments
        float32[B, S, scores], from the last such token of each segment. A segment that a row has not has no meaningful score."""
        # Rows of pairs have a token more than `data.sequence_length`, which is checked.
        tokens_BT, token_weight_BT = filled_up(tokens_BT), filled_up(token_weight_BT)
        of = None if of is None else Segments(filled_up(of.segments_BT), filled_up(of.positions_BT), of.number)
        counted_BTS = (token_weight_BT > 0)[:, :, None]
        positions_BT, segments_BT = (None, None) if of is None else (of.positions_BT, of.segments_BT)
        if of is not None:
            counted_BTS &= of.segments_BT[:, :, None] == jnp.arange(1, of.number + 1)
        x_BTD = self.hidden(tokens_BT, positions_BT, segments_BT).x_BTD
        last_BS = jnp.max(jnp.where(counted_BTS, jnp.arange(tokens_BT.shape[1])[:, None], 0), axis=1)
        x_BSD = jnp.take_along_axis(x_BTD, last_BS[:, :, None], axis=1)
        scores = x_BSD.astype(jnp.float32) @ self.head[...].astype(jnp.float32)
        return scores[:, 0] if of is None else scores

    def _table(self) -> jax.Array:
        # Nothing is multiplied by it.
        return self.embed[...].T


class ScoringTask:
    """The base of tasks whose model is a decoder with a head. The weights of the decoder may come from a folder of Hugging Face
    (`model.pretrained`, `init_from`): the head then begins as in any new run."""

    own_parameters = OWN_PARAMETERS
    has_perplexity = False
    reads = CausalLMTask.reads - {"labels"} | {"example_weight"}

    def __init__(self, arguments: TrainingArguments):
        self.arguments = arguments
        if problems := list(self.problems()):
            raise UsageError("\n".join(problems))

    @property
    def num_scores(self) -> int:
        raise NotImplementedError

    @property
    def ids(self) -> dict[str, Ids]:
        """The ids that the leaves of a batch may have: those of the model's vocabulary."""
        return {"tokens": Ids(self.arguments.model.vocab_size)} if type(self).build_model is ScoringTask.build_model else {}

    def problems(self) -> Iterator[str]:
        """Yields what is wrong with the settings."""
        if self.arguments.lora is not None:
            yield f"lora: {type(self).__name__} trains a head too, which no adapter has; leave lora out"

    def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
        arguments = self.arguments
        return ScoringDecoder(
            arguments.model, self.num_scores, rngs=rngs, dtype=arguments.dtype, param_dtype=arguments.param_dtype
        )

    def scores(self, model: ScoringDecoder, batch: Batch) -> jax.Array:
        """Returns the scores of the texts of all N lines of a batch: float32[N, scores], or of packed rows, with S texts in each
        line, [N, S, scores]."""
        lines = lines_of(batch)
        if "segments" not in lines:
            return model.scores(lines["tokens"], lines["token_weight"])
        segments = Segments(lines["segments"], lines["positions"], batch["example_weight"].shape[-1])
        return model.scores(lines["tokens"], lines["token_weight"], segments)

    @property
    def tokens_per_example(self) -> int:
        return self.arguments.data.sequence_length

    def flops_per_token(self, num_parameters: int) -> float:
        """Returns those of a language model (`trainers.tasks.causal_lm`) without logits: its table is only looked up."""
        model = self.arguments.model
        looked_up = model.vocab_size + (model.num_positions or 0)
        return flops_of_decoder(model, self.arguments.data.sequence_length, num_parameters - looked_up * model.width)

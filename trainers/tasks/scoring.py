"""What the tasks that score whole texts have in common."""

from __future__ import annotations

from collections.abc import Iterator

import jax
from flax import nnx

from gangway.errors import UsageError
from trainers.config.arguments import TrainingArguments
from trainers.models.scoring import OWN_PARAMETERS, ScoringDecoder, Segments
from trainers.protocol import Batch, Ids
from trainers.tasks.causal_lm import CausalLMTask, flops_of_decoder
from trainers.tasks.segments import lines_of


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

"""The task of classifying texts."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax

from trainers.protocol import Batch, PerExample
from trainers.tasks.causal_lm import check_leaves
from trainers.tasks.scoring import ScoringDecoder, ScoringTask
from trainers.tasks.segments import per_example


class ClassificationTask(ScoringTask):
    """Learns which of `classification.labels` a text has. `batch` is {"tokens": int32[B, T], "token_weight": float32[B, T],
    "label": int32[B], "weight": float32[B]}. Padding has the token weight 0. The loss is the cross-entropy of the label, as a
    mean over the texts.

    Of packed rows, text i is segment i of its row: `segments` and `positions`, int32[B, T]; `label`, int32[B, S]; and
    `example_weight`, float32[B, S], with S as many as the fullest row of the plan has texts.
    """

    reads = ScoringTask.reads | {"label"}
    dataset = "trainers.data.sources.classification:labelled_texts"
    predicts = "labels"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.arguments.classification.labels:
            yield "classification.labels = []: expected the names of the classes, such as [negative, positive]"

    @property
    def num_scores(self) -> int:
        """The number of classes."""
        return len(self.arguments.classification.labels)

    def loss(self, model: ScoringDecoder, batch: Batch) -> PerExample:
        check_leaves(self, batch, ClassificationTask)
        logits, label = self.predictions(model, batch)["logits"], batch["label"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        hits = (jnp.argmax(logits, -1) == label).astype(jnp.float32)
        num_tokens = jnp.sum(batch["token_weight"] > 0, 1)
        return per_example(batch, losses, {"accuracy": hits}, num_tokens)

    def predictions(self, model: ScoringDecoder, batch: Batch) -> dict[str, jax.Array]:
        """Returns the logits of the classes, float32[B, labels]; of packed rows [B, S, labels], where `example_weight` says which
        count."""
        return {"logits": self.scores(model, batch)}

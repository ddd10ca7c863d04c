"""Tasks whose examples have different numbers of targets, and what a run of them must give: computed with `jax.grad` on the whole
batch at once, with nothing of the trainer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainers.config.arguments import TrainingArguments
from trainers.protocol import Loss

VOCABULARY, LENGTH, BETA = 31, 12, 0.5
RATE = 0.5


class Scores(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (VOCABULARY, 6)))
        self.out = nnx.Param(jax.random.normal(rngs.params(), (6, VOCABULARY)))


def log_likelihoods(table, out, tokens):
    """Of each token after the first: [B, LENGTH]."""
    logp = jax.nn.log_softmax(jnp.tanh(table[tokens[:, :-1]]) @ out)
    return jnp.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0]


def is_long(lengths):
    """Examples that have targets in the second term: in some batches few, in some micro-batches none."""
    return lengths > LENGTH - 2


class Ragged:
    """Example i has 1 to LENGTH targets, very unevenly spread over micro-batches."""

    tokens_per_example = LENGTH

    def __init__(self, arguments: TrainingArguments):
        self.arguments = arguments

    def build_model(self, rngs):
        return Scores(rngs)

    def flops_per_token(self, num_parameters):
        return 6.0 * num_parameters

    def likelihoods(self, model, batch, name="tokens"):
        real = (jnp.arange(LENGTH) < batch["length"][:, None]) * batch["weight"][:, None]
        return log_likelihoods(model.table[...], model.out[...], batch[name]) * real, real


class Plain(Ragged):
    def loss(self, model, batch):
        logp, real = self.likelihoods(model, batch)
        return Loss(-jnp.sum(logp), jnp.sum(real))


class Terms(Ragged):
    """Means over tokens, over long examples, and over all examples."""

    def loss(self, model, batch):
        logp, real = self.likelihoods(model, batch)
        long = is_long(batch["length"]) * batch["weight"]
        return {
            "long": (-jnp.sum(jnp.sum(logp, -1) * long), jnp.sum(long)),
            "targets": (-jnp.sum(logp), jnp.sum(real)),
            "squares": (jnp.sum(jnp.sum(logp, -1) ** 2 * batch["weight"]) / 100, jnp.sum(batch["weight"])),
        }


class TermsInAnotherOrder(Terms):
    """Not that of the alphabet, in which JAX gives dicts back."""

    def loss(self, model, batch):
        terms = super().loss(model, batch)
        return {name: terms[name] for name in ("targets", "squares", "long")}


class Preference(Ragged):
    """Direct preference optimization (Rafailov et al. 2023): a target is a pair, however long its two answers are."""

    def loss(self, model, batch):
        chosen, _ = self.likelihoods(model, batch, "tokens")
        rejected, _ = self.likelihoods(model, batch, "rejected")
        margin = jnp.sum(chosen, -1) - jnp.sum(rejected, -1) - batch["reference_margin"]
        return Loss(-jnp.sum(jax.nn.log_sigmoid(BETA * margin) * batch["weight"]), jnp.sum(batch["weight"]))


class Examples:
    takes_any_index = True

    def __init__(self, num_examples=96):
        rng = np.random.default_rng(7)
        self.tokens, self.rejected = rng.integers(0, VOCABULARY, (2, num_examples, LENGTH + 1), dtype=np.int32)
        # Long ones first in each batch: micro-batches differ in their numbers of targets as much as they can.
        self.lengths = np.where(np.arange(num_examples) % 36 < 12, LENGTH, 1 + np.arange(num_examples) % 3).astype(np.int32)
        self.lengths[36:72] = 2  # a batch without a long one
        self.reference_margin = rng.normal(size=num_examples).astype(np.float32)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        i = index % len(self)
        return {
            "tokens": self.tokens[i],
            "rejected": self.rejected[i],
            "length": self.lengths[i],
            "reference_margin": self.reference_margin[i],
            "sample_id": np.int32(i),
        }


def examples(arguments: TrainingArguments):
    return Examples(), None


# ---------------------------------------------------------------------- what must come out


def mean_of_tokens(params, rows):
    likelihoods, _ = per_token(params, rows)
    return -jnp.mean(likelihoods)


def mean_of_terms(params, rows):
    each, long = per_example(params, rows), is_long(rows["length"])
    return mean_of_tokens(params, rows) - (jnp.mean(each[long]) if long.any() else 0.0) + jnp.mean(each**2) / 100


def mean_of_pairs(params, rows):
    margins = per_example(params, rows) - per_example(params, rows, "rejected") - rows["reference_margin"]
    return jnp.mean(jnp.log(1 + jnp.exp(-BETA * margins)))


def per_token(params, rows, name="tokens"):
    """The log likelihoods of all targets of the batch in one row, without padding or mask; and whose each is."""
    owner, place = np.nonzero(np.arange(LENGTH) < rows["length"][:, None])
    scores = jnp.tanh(params["table"][rows[name][owner, place]]) @ params["out"]
    chosen = scores[np.arange(len(owner)), rows[name][owner, place + 1]]
    return chosen - jnp.log(jnp.sum(jnp.exp(scores), -1)), owner


def per_example(params, rows, name="tokens"):
    likelihoods, owner = per_token(params, rows, name)
    return jax.ops.segment_sum(likelihoods, owner, len(rows["length"]))


DIRECTLY = {
    "Plain": mean_of_tokens,
    "Terms": mean_of_terms,
    "TermsInAnotherOrder": mean_of_terms,
    "Preference": mean_of_pairs,
}


def direct_run(task: str, params, batch_size: int, num_steps: int):
    """(losses, gradient norms, parameters) of plain gradient descent, each step on one whole batch."""
    mean, data = DIRECTLY[task], Examples()
    losses, norms = [], []
    for step in range(num_steps):
        picked = [data[step * batch_size + i] for i in range(batch_size)]
        rows = {name: np.stack([example[name] for example in picked]) for name in picked[0]}
        loss, gradients = jax.value_and_grad(mean)(params, rows)
        losses.append(float(loss))
        norms.append(float(np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(gradients)))))
        params = jax.tree.map(lambda p, g: p - RATE * g, params, gradients)
    return losses, norms, params


SETTINGS = {
    "global_batch_size": 36,
    "max_num_steps": 3,
    "publish_every_steps": 1,
    "data": {"dataset": "tests.programs.ragged:examples"},
    "optimizer": {
        "name": "sgd",
        "learning_rate": RATE,
        "betas": [0.0, 0.0],
        "weight_decay": 0.0,
        "max_grad_norm": None,
        "schedule": {"name": "constant"},
    },
    "checkpoint": {"save_at_end": False},
}

"""A trainer for images with a frozen encoder, parameter groups, and a processor that is saved with the model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from trainers.base import BaseTrainer
from trainers.callbacks import Callback
from trainers.protocol import PerExample

NUM_LABELS, SIDE = 4, 8


def images(arguments):
    rng, examples = np.random.default_rng(3), []
    for label in rng.integers(NUM_LABELS, size=1100):
        image = rng.normal(60, 20, size=(SIDE, SIDE))
        row, column = divmod(int(label), 2)
        image[row * 4 : row * 4 + 4, column * 4 : column * 4 + 4] += 40  # the bright quarter is the label
        examples.append({"image": np.clip(image, 0, 255).astype(np.uint8), "label": np.int32(label)})
    return examples[:1000], examples[1000:]


class Classifier(nnx.Module):
    def __init__(self, width, rngs):
        self.encoder = nnx.Linear(SIDE * SIDE, width, rngs=rngs)
        self.head = nnx.Linear(width, NUM_LABELS, rngs=rngs)

    def __call__(self, pixels):
        return self.head(jnp.tanh(self.encoder(pixels.reshape(len(pixels), -1))))


class ImageTask:
    tokens_per_example = 1

    def __init__(self, arguments):
        self.arguments = arguments

    def build_model(self, rngs):
        return Classifier(self.arguments.model.width, rngs)

    def loss(self, model, batch):
        logits = model(batch["pixels"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return PerExample(losses, {"accuracy": jnp.argmax(logits, -1) == batch["label"]})

    def flops_per_token(self, num_parameters):
        return 6.0 * num_parameters


class LossWatcher(Callback):
    """Keeps the smallest loss of the run. It reads numbers when they are published, not at each step."""

    def __init__(self, trainer):
        self.trainer, self.smallest_loss = trainer, float("inf")

    def on_publish(self, state, *, step, metrics, seconds, **kwargs):
        self.smallest_loss = min(self.smallest_loss, metrics["loss"])

    def on_train_end(self, state, **kwargs):
        if jax.process_index() == 0:
            print(f"step {state.global_step}: the smallest loss was {self.smallest_loss:.3f}")


class ImageTrainer(BaseTrainer):
    def post_init(self):
        self.add_callback(LossWatcher(self))

    def build_model_assets(self):
        self.processor = {"mean": 70.0, "scale": 30.0}
        return {"processor": self.processor}

    def build_data_transform(self):
        mean, scale = self.processor["mean"], self.processor["scale"]

        def process(example):
            return {"pixels": (example["image"].astype(np.float32) - mean) / scale, "label": example["label"]}

        return process

    def freeze_module(self):
        return ["encoder"]

    def build_param_groups(self):
        return [{"pattern": "head.bias", "learning_rate": 0.02, "weight_decay": 0.0}]

    def postforward(self, loss, batch):
        brightness = jnp.sum(jnp.mean(batch["pixels"], (1, 2)) * batch["weight"])
        return loss._replace(parts={**loss.parts, "brightness": (brightness, jnp.sum(batch["weight"]))})

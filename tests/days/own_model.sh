#!/usr/bin/env bash
# A model of one's own, like a U-Net: it takes the noise out of images, by a loss of one's own; killed, resumed, exported, reported.
source "$(dirname "${BASH_SOURCE[0]}")/day.sh"

# docs/start.md: gangway init my-project
shows 'gangway run config.yaml' gangway init my-project
cd my-project
STEPS=$((5 * STEPS))  # its steps are short: it is killed before it ends
cat > model.py <<'PYTHON'
import jax
import jax.numpy as jnp
from flax import nnx

from trainers.protocol import PerExample


class UNet(nnx.Module):
    """Down to half the size and up again; what was seen before the way down is put beside what comes up."""

    def __init__(self, width, rngs):
        def convolution(ins, outs, **more):
            return nnx.Conv(ins, outs, (3, 3), rngs=rngs, **more)

        self.first, self.down = convolution(1, width), convolution(width, 2 * width, strides=2)
        self.middle = convolution(2 * width, 2 * width)
        self.up = nnx.ConvTranspose(2 * width, width, (2, 2), strides=(2, 2), rngs=rngs)
        self.last, self.out = convolution(2 * width, width), convolution(width, 1)

    def __call__(self, image):
        """[B, 16, 16, 1] -> [B, 16, 16, 1]"""
        across = jax.nn.relu(self.first(image))
        below = jax.nn.relu(self.middle(jax.nn.relu(self.down(across))))
        beside = jnp.concatenate([across, self.up(below)], axis=-1)
        return image + self.out(jax.nn.relu(self.last(beside)))


class DenoiseTask:
    tokens_per_example = 1

    def __init__(self, arguments):
        self.arguments = arguments

    def build_model(self, rngs):
        return UNet(self.arguments.model.width, rngs)

    def loss(self, model, batch):
        """Far errors count less than their square: the loss of Charbonnier. One number for each example."""
        error = model(batch["noisy"]) - batch["clean"]
        return PerExample(jnp.sqrt(error**2 + 1e-3).mean((1, 2, 3)), {"squared": (error**2).mean((1, 2, 3))})

    def flops_per_token(self, num_parameters):
        return 6.0 * num_parameters
PYTHON
cat > data.py <<'PYTHON'
import numpy as np


def squares(arguments):
    return images(1024, arguments.seed), images(256, arguments.seed + 1)


def images(number, seed):
    random = np.random.default_rng(seed)
    clean = np.zeros((number, 16, 16, 1), np.float32)
    for image, (row, column, size) in zip(clean, random.integers((0, 0, 3), (10, 10, 7), size=(number, 3)), strict=True):
        image[row : row + size, column : column + size] = 1
    return {"clean": clean, "noisy": clean + 0.3 * random.normal(size=clean.shape).astype(np.float32)}
PYTHON
sed -i "s/model:SpiralsTask/model:DenoiseTask/; s/data:spirals/data:squares/; s/spirals/squares/; s/^max_num_steps: .*/max_num_steps: $STEPS/
  s/^publish_every_steps: .*/publish_every_steps: 5/; s/^model: .*/model: {width: 8}/; s/^global_batch_size: .*/global_batch_size: 32/
  s/^evaluation: .*/evaluation: {every_steps: $((STEPS / 2))}/; s/^checkpoint: .*/checkpoint: {save_steps: 5}/" config.yaml

# docs/how_to.md: gangway data config.yaml
shows 'noisy +float32' gangway data config.yaml
# docs/how_to.md: gangway run config.yaml --dry-run
shows '# parameters ' gangway run config.yaml --dry-run

# docs/start.md: gangway run config.yaml
behind run.log gangway run config.yaml
seen run.log ' saved [0-9]+'
# docs/start.md: kill -9
kill -9 "$(process run.log 0)"
seen run.log 'host 0: training process ended by SIGKILL'
ended 0 run.log 'squares finished|restarts +1'
grep --quiet 'training again at step [0-9]* after' run.log

# docs/start.md: gangway run quickstart.yaml name=undisturbed
shows 'undisturbed finished' gangway run config.yaml name=undisturbed
# docs/start.md: gangway compare runs/quickstart runs/undisturbed
shows 'undisturbed' gangway compare runs/squares runs/undisturbed
same() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["params_digest"])' "runs/$1/summary.json"; }
[ "$(same squares)" = "$(same undisturbed)" ] || fail 'the run that was killed has other parameters'

# docs/commands.md: gangway evaluate runs/spirals --json
ends 2 'data:squares, model:DenoiseTask' gangway evaluate runs/squares
# docs/commands.md: --trust-code
shows 'eval_squared|squared' gangway evaluate runs/squares --trust-code model:DenoiseTask --trust-code data:squares
# docs/commands.md: gangway export runs/spirals
shows 'model.safetensors' gangway export runs/squares model.safetensors
# docs/commands.md: gangway report runs/spirals --figures pictures
shows 'report.html' gangway report runs/squares --figures pictures
grep --quiet SIGKILL runs/squares/report.html
ls pictures/*.png

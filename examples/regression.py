"""A regression on arrays, in this process and without a configuration: python -m examples.regression"""

import numpy as np
from flax import nnx

from gangway import Training


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden, self.out = nnx.Linear(1, 64, rngs=rngs), nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.tanh(self.hidden(x)))


def squared_error(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).sum(-1)  # [batch]: the loss of each example


if __name__ == "__main__":
    x = np.linspace(-2, 2, 200, dtype=np.float32)[:, None]
    adam = {"name": "adam", "learning_rate": 0.03}
    result = Training(Net, squared_error, {"x": x, "y": np.sin(2 * x)}, steps=300, batch_size=40, optimizer=adam).fit()
    print(result, "sin(2 * 0.5) is about", result.model(np.array([0.5])))

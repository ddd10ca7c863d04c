"""What the model learns from: points on two spirals. Put your own data in their place."""

import numpy as np


def spirals(arguments):
    """Returns the training data and the held-out data, as dicts of arrays. The configuration names this function."""
    return points(2048, arguments.seed), points(512, arguments.seed + 1)


def points(num_points, seed):
    random = np.random.default_rng(seed)
    label = random.integers(2, size=num_points)
    angle = 3 * np.pi * np.sqrt(random.uniform(size=num_points))
    turned = angle + np.pi * label  # the second spiral is the first one, turned by half a circle
    point = np.stack([np.cos(turned), np.sin(turned)], axis=-1) * (angle / (3 * np.pi))[:, None]
    noise = 0.06 * random.normal(size=point.shape)
    return {"point": (point + noise).astype(np.float32), "label": label.astype(np.int32)}

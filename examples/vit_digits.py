"""The data of a vision transformer that reads handwritten digits: the images that come with scikit-learn."""

import numpy as np
from sklearn.datasets import load_digits

NUM_TEST = 360
SHIFTS = [(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)]


class Digits:
    """Images of 8 x 8 pixels with 17 shades of grey, each as it is and moved by a pixel."""

    def __init__(self, images, labels, shifts):
        self.images, self.labels, self.shifts = images, labels, shifts

    def __len__(self):
        return len(self.images) * len(self.shifts)

    def __getitem__(self, index):
        number, shift = divmod(index, len(self.shifts))
        return {"image": np.roll(self.images[number], self.shifts[shift], (0, 1)), "label": self.labels[number]}


def digits(arguments):
    """Training data and test data, in an order that is always the same."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    pixels = (images[order].reshape(-1, 8, 8, 1) / 8 - 1).astype(np.float32)
    labels = labels[order].astype(np.int32)
    return Digits(pixels[NUM_TEST:], labels[NUM_TEST:], SHIFTS), Digits(pixels[:NUM_TEST], labels[:NUM_TEST], SHIFTS[:1])

"""A fine-tune: the layers of the digits' classifier stay as they were trained, and a new last layer learns odd and even."""

from flax import nnx

from examples.digits import SIDE, Classifier, DigitsTask, digits


def parities(arguments):
    """The images of the other run, with 0 for even digits and 1 for odd ones."""
    return tuple({**part, "label": part["label"] % 2} for part in digits(arguments))


class ParityTask(DigitsTask):
    def build_model(self, rngs):
        width = self.arguments.model.width
        model = Classifier(width, rngs)
        model.out = nnx.Linear(2 * width * (SIDE // 4) ** 2, 2, rngs=rngs)
        return model

"""A callback: it watches a run and changes nothing. This one draws the loss as a line of text, and keeps it beside the run."""

from etils import epath

from trainers.base import BaseTrainer
from trainers.callbacks import Callback

LEVELS = " .:-=+*#%@"


class LossLine(Callback):
    def __init__(self, folder):
        self.path, self.losses = epath.Path(folder) / "loss_line.txt", []

    def on_publish(self, state, *, step, metrics, **kwargs):
        """The numbers are on the host by now: looking at them makes nobody wait."""
        self.losses.append(metrics["loss"])

    def on_train_end(self, state, **kwargs):
        low, high = min(self.losses), max(self.losses)
        places = [(loss - low) / max(high - low, 1e-9) * (len(LEVELS) - 1) for loss in self.losses]
        self.path.write_text("".join(LEVELS[round(place)] for place in places))


class WatchedTrainer(BaseTrainer):
    def post_init(self):
        self.add_callback(LossLine(f"{self.arguments.storage}/{self.arguments.name}"))

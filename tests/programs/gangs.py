"""A trainer that tells which gangs its first device belongs to."""

from __future__ import annotations

from trainers import runtime
from trainers.base import BaseTrainer
from trainers.parallel.groups import mesh_groups


class TellsGangs(BaseTrainer):
    def on_training_start(self, state):
        found = mesh_groups(self.functions.mesh).values()
        runtime.current().emit("gangs", found={one.name: [one.rank, one.size, one.host_rank, one.num_hosts] for one in found})
        return state

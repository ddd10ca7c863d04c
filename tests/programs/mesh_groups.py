"""A trainer that notes which mesh groups its first device belongs to."""

from __future__ import annotations

import json

from trainers import runtime
from trainers.base import BaseTrainer
from trainers.parallel.groups import mesh_groups


class NotesMeshGroups(BaseTrainer):
    def on_training_start(self, state):
        groups = mesh_groups(self.functions.mesh).values()
        ranks = {group.name: [group.rank, group.size, group.host_rank, group.num_hosts] for group in groups}
        runtime.current().note(json.dumps(ranks))
        return state

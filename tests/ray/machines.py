"""What a local Ray cluster has left."""

from cluster import groups
from cluster.gang import living_nodes


def everything_is_free():
    kinds = ("CPU", "TPU")
    return not groups.living() and all(node.free.get(kind) == node.total.get(kind) for node in living_nodes() for kind in kinds)

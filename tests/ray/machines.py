"""What a local Ray cluster has left."""

from cluster import groups
from cluster.places import living_nodes


def everything_is_free():
    nodes = living_nodes()
    whole = all(node.free.get(kind) == node.total.get(kind) for node in nodes for kind in ("CPU", "TPU"))
    return whole and not groups.living() and not any("bundle_group" in name for node in nodes for name in node.free)

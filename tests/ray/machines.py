"""What a local Ray cluster has left."""

from cluster.placement import placement_groups
from cluster.placement.bundles import living_nodes


def everything_is_free():
    nodes = living_nodes()
    whole = all(node.free.get(kind) == node.total.get(kind) for node in nodes for kind in ("CPU", "TPU"))
    return whole and not placement_groups.living() and not any("bundle_group" in name for node in nodes for name in node.free)

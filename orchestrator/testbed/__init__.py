"""A real run seen from outside, on a cluster, disk or server that can be broken."""

"""A real run observed from outside, on a cluster, disk or server that can be broken."""

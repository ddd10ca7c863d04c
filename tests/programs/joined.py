"""Joins a gang, talks to the others once, and stays until its standard input ends: HOST NUM_HOSTS COORDINATOR."""

import sys

import jax

from trainers.runtime import distributed

host, num_hosts, coordinator = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
distributed.join(distributed.JoinSpec(host=host, num_hosts=num_hosts, coordinator=coordinator))
mesh = jax.make_mesh((jax.device_count(),), ("all",))
spread = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
ones = jax.make_array_from_callback((jax.device_count(),), spread, lambda index: jax.numpy.ones(1))
print("sum", float(jax.jit(jax.numpy.sum)(ones)), flush=True)
sys.stdin.read()

"""A driver that takes a gang in a cluster, prints its processes as a JSON line, and waits: `python -m ... RUN_NAME LOG_DIR`."""

import json
import sys
import time

import ray

from cluster.gang import reserve
from cluster.topology import HostsConfig


def main():
    ray.init(log_to_driver=False, logging_level="error")
    gang = reserve(HostsConfig(count=2), sys.argv[1], log_dir=sys.argv[2], module="tests.programs.echo_worker")
    gang.prepare({})
    answers = ray.get([agent.go.remote({"generation": 0}) for agent in gang.agents])
    print(json.dumps([answer["pid"] for answer in answers]), flush=True)
    time.sleep(1000)


if __name__ == "__main__":
    main()

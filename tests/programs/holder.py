"""A driver that takes a gang in a cluster, starts it, prints its processes and its record as a JSON line, and waits.

`python -m tests.programs.holder JSON`: `run_name`, `log_dir`, `hosts`, and what else `reserve` takes.
"""

import json
import sys
import time

import ray

from cluster.gang.acquire import reserve
from cluster.hosts.config import HostsConfig


def main():
    settings = json.loads(sys.argv[1])
    hosts = HostsConfig(**settings.pop("hosts"))
    ray.init(log_to_driver=False, logging_level="error")
    gang = reserve(hosts, settings.pop("run_name"), module="tests.programs.echo_worker", **settings)
    gang.prepare({"tag": "prepared"})
    count = len(gang.members)
    answers = ray.get([gang.call(host, "start", {"generation": 0, "host": host, "num_hosts": count}) for host in range(count)])
    print(json.dumps({"pids": [answer["pid"] for answer in answers], "record": gang.record()}), flush=True)
    time.sleep(1000)


if __name__ == "__main__":
    main()

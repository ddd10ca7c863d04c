"""Where the processes of a gang listen: for the other hosts, and for nobody else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import psutil
import pytest

from cluster.agent import machine
from cluster.agent.machine import with_port
from tests import ROOT


def addresses():
    """This machine's loopback addresses, and one by which others reach it."""
    of_family = {family: [] for family in (socket.AF_INET, socket.AF_INET6)}
    for found in psutil.net_if_addrs().values():
        for one in found:
            if one.family in of_family and not one.address.startswith("fe80"):
                of_family[one.family].append(one.address)
    return [*of_family[socket.AF_INET][:2], *of_family[socket.AF_INET6][:1]]


def listening(process):
    """The addresses that it listens on."""
    sockets = psutil.Process(process.pid).net_connections("inet")
    return [one.laddr.ip.removeprefix("::ffff:") for one in sockets if one.status == psutil.CONN_LISTEN]


@pytest.mark.parametrize("address", addresses())
def test_the_processes_of_a_gang_listen_at_the_address_that_the_others_were_given_and_at_no_other(address):
    coordinator = with_port(address, machine.free_port())
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    with ExitStack() as ended:
        hosts = []
        for host in range(2):
            command = [sys.executable, "-m", "tests.programs.joined", str(host), "2", coordinator]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)
            ended.callback(process.wait)
            ended.callback(process.kill)
            hosts.append(process)
        assert [next((line for line in host.stdout if line.startswith("sum")), None) for host in hosts] == ["sum 2.0\n"] * 2
        assert [len(listening(host)) for host in hosts] == [2, 1], "the coordinator, and collectives on CPUs"
        assert {at for host in hosts for at in listening(host)} == {address}

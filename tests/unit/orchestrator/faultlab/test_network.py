"""Networks of `chaos` on one machine, as the kernel has them."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress

import pytest

from orchestrator.faultlab.testbed import local_cluster
from orchestrator.faultlab.testbed.local_cluster import Network, network, why_no_network
from orchestrator.faultlab.testbed.resources import ResourceError

NO_NETWORK = why_no_network()
pytestmark = pytest.mark.skipif(NO_NETWORK is not None, reason=str(NO_NETWORK))


def test_what_a_killed_process_has_left_of_a_network_is_in_nobodys_way():
    """It had this process's number; a third network is made beside the two."""
    left, made = Network(), Network()
    left.open()
    try:
        made.open()
        with network() as third:
            assert len({net.bridge for net in (left, made, third)}) == len({net.head_ip for net in (left, made, third)}) == 3
            assert third.ip_of(1).startswith(f"10.231.{third.octet}.")
    finally:
        made.close()
        left.close()
    assert not {left.bridge, made.bridge} & {*os.listdir("/sys/class/net")}


def test_a_machine_without_room_for_another_network_says_so(monkeypatch):
    monkeypatch.setattr(local_cluster, "NETWORKS", 1)
    with ExitStack() as networks:
        with suppress(ResourceError):  # what a killed process has left may be there already
            networks.enter_context(network())
        with pytest.raises(ResourceError, match="File exists"):
            networks.enter_context(network())
        assert Network().bridge in os.listdir("/sys/class/net"), "it was not another's to delete"

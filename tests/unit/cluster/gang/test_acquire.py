"""What of the settings reaches the agents and the waits for machines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cluster.gang import acquire, gang, slots
from cluster.hosts.config import HostsConfig


@pytest.mark.parametrize(("timeout_s", "expected"), [(None, 33.0), (5.0, 5.0)])
def test_a_start_waits_for_its_machines_as_long_as_the_settings_say(monkeypatch, timeout_s, expected):
    waits = []
    taking = SimpleNamespace(take_hosts=lambda timeout_s, check_stop: waits.append(timeout_s))
    monkeypatch.setattr(acquire, "KINDS", {"cpu": lambda maker, avoid_nodes: taking})
    assert acquire.reserve(HostsConfig(start_timeout_s=33.0), "run", log_dir="/logs", timeout_s=timeout_s) is taking
    assert waits == [expected]


def test_a_gang_waits_for_hosts_that_it_can_do_without_as_long_as_the_settings_say(monkeypatch):
    waits = []
    monkeypatch.setattr(gang, "wait_until", lambda done, timeout_s, check_stop: waits.append(timeout_s))
    monkeypatch.setattr(gang.placement_groups, "is_created", lambda group: group == "ready")
    config = HostsConfig(min=1, max=3, wait_for_max_s=7.0)
    asked = [SimpleNamespace(bundle=SimpleNamespace(group=group)) for group in ("ready", "pending", "ready")]
    assert gang.placed(asked, 2, config, lambda: None) == [asked[0], asked[2]]
    assert waits == [7.0]


def test_an_agent_is_reported_where_notices_come_from(monkeypatch):
    made = []
    options = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_, **about: made.append(about)))
    monkeypatch.setattr(slots.ray, "remote", lambda **_: lambda cls: options)
    monkeypatch.setattr(slots, "PlacementGroupSchedulingStrategy", lambda *_: None)
    config = HostsConfig(notice_file="/run/notice", metadata="gce")
    maker = slots.AgentMaker(config, "run", driver_term=1, lease_s=1, log_dir="/logs", cache_dir="/cache", module="m")
    maker.create(SimpleNamespace(group=None, index=0), 0)
    assert (made[0]["notice_file"], made[0]["metadata"]) == ("/run/notice", "gce")

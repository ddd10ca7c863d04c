"""What is shown and stored of a run holds no secrets; what is passed on does."""

import json
import os
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.gang import slots
from cluster.hosts.config import HostsConfig
from gangway.config.masking import masked
from gangway.config.yaml_source import shown_override
from gangway.storage import documents
from orchestrator.config.job import ConfigError, build, load, shown, to_dict, to_yaml
from orchestrator.driver import main
from orchestrator.planning import report

SECRET = "c4n4ry"
PARTS = st.text(alphabet="abcXYZ019-_.~!$&*+;=", min_size=1, max_size=12)
PASSWORDS = st.text(alphabet="abcXYZ019-_.~!$&*+;=:/?#%", max_size=12)


def job(**more):
    return {"name": "job", "storage": "/tmp/runs", "max_num_steps": 1, **more}


SECRETIVE = job(
    hosts={"env": {"API_TOKEN": SECRET, "XLA_FLAGS": f"--xla_{SECRET}"}},
    tracking={"uri": f"postgresql://me:{SECRET}@db:5432/mlflow?sslpassword={SECRET}"},
    data={"paths": [f"https://{SECRET}@host/data.txt"]},
)


@pytest.mark.parametrize(
    ("text", "shows"),
    [
        ("http://host:5000", "http://host:5000"),
        ("http://me@host:5000", "http://***@host:5000"),
        ("http://me:pass@host:5000/path", "http://***@host:5000/path"),
        ("postgresql+psycopg2://me:pa/ss@host/db", "postgresql+psycopg2://***@host/db"),
        ("http://me:p@ss@host/db", "http://***@host/db"),
        ("could not reach 'http://:pass@host' twice, http://a@b", "could not reach 'http://***@host' twice, http://***@b"),
        ("sqlite:////home/me@work/mlflow.db", "sqlite:////home/me@work/mlflow.db"),
        ("gs://bucket/run@2", "gs://bucket/run@2"),
        ("https://host/f?access_key=x&size=3&X-Amz-Signature=y", "https://host/f?access_key=***&size=3&X-Amz-Signature=***"),
        ("ask me@host, or see /tmp/a:b@c", "ask me@host, or see /tmp/a:b@c"),
    ],
)
def test_who_logs_in_and_with_what_is_masked(text, shows):
    assert masked(text) == shows
    assert masked(masked(text)) == shows


@given(user=PARTS, password=PASSWORDS, text=st.text(max_size=20))
def test_no_password_of_a_url_is_ever_shown(user, password, text):
    shown_text = masked(f"{text} http://{user}:{SECRET}{password}{SECRET}@host/path")
    assert SECRET not in shown_text
    assert shown_text.endswith("@host/path")


@given(st.recursive(st.none() | st.integers() | PARTS, lambda items: st.lists(items) | st.dictionaries(PARTS, items)))
def test_what_holds_no_url_stays_as_it_is(data):
    assert masked(data) == data


def test_what_is_shown_of_a_configuration_names_variables_without_their_values():
    config = build(SECRETIVE)
    assert shown(config)["hosts"]["env"] == {"API_TOKEN": "***", "XLA_FLAGS": "***"}
    assert shown(config)["tracking"]["uri"] == "postgresql://***@db:5432/mlflow?sslpassword=***"
    for text in (json.dumps(shown(config)), to_yaml(config), json.dumps(report.parameters(config)), repr(config)):
        assert SECRET not in text
    assert "hosts.env.API_TOKEN" in report.parameters(config)


def test_overrides_are_stored_without_secrets():
    given = ["hosts.env.TOKEN=abc", "hosts.env={A: b}", "tracking.uri=http://me:abc@host", "seed=3"]
    assert [*map(shown_override, given)] == ["hosts.env.TOKEN=***", "hosts.env=***", "tracking.uri=http://***@host", "seed=3"]


def test_what_is_passed_on_is_the_real_value():
    config = build(SECRETIVE)
    assert build(to_dict(config)) == config
    assert config.hosts.env["API_TOKEN"] == SECRET
    assert config.tracking.resolved_uri("/tmp/runs/job") == SECRETIVE["tracking"]["uri"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"hosts": {"env": [f"TOKEN={SECRET}"]}}, "hosts.env: expected a section of keys and values (found a list)"),
        ({"hosts": {"env": {"TOKEN": [SECRET]}}}, "hosts.env.TOKEN: expected text (found a list)"),
        ({"hosts": {"enviroment": {"TOKEN": SECRET}}}, "hosts.enviroment: unknown key (found a section)"),
        ({"hosts": {"env": SECRET}}, "hosts.env: expected a section of keys and values (found text)"),
        ({"tracking": {"uri": f"me:{SECRET}@host:5000"}}, "tracking.uri = '***@host:5000': expected a URL"),
        ({"tracking": {"urii": f"http://me:{SECRET}@host"}}, 'tracking.urii: unknown key (found "http://***@host")'),
    ],
)
def test_an_error_in_a_configuration_tells_no_secret(wrong, told):
    with pytest.raises(ConfigError) as raised:
        build(job(**wrong))
    assert told in str(raised.value)
    assert SECRET not in str(raised.value)


def test_an_error_in_an_override_tells_no_secret(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("max_num_steps: 1\n")
    with pytest.raises(ConfigError) as raised:
        load(path, [f"hosts.env.A.B={SECRET}", f"hosts.env=[{SECRET}]", "hosts.env=x", f"hosts.env.A={SECRET}"])
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(("private", "mode"), [(True, 0o600), (False, 0o644)])
def test_what_a_run_writes_is_for_its_user_alone_unless_a_group_shares_it(tmp_path, private, mode):
    before = os.umask(0o022)
    try:
        main.keep_private(build(job(hosts={"private_files": private})))
        documents.write_json(tmp_path / "run" / "launch.json", {})
    finally:
        os.umask(before)
    assert (tmp_path / "run" / "launch.json").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("private", [True, False])
def test_an_agent_is_reported_whether_its_files_are_private(monkeypatch, private):
    made = []
    monkeypatch.setattr(slots.ray, "remote", lambda **_: lambda cls: SimpleNamespace(options=lambda **_: recording(made)))
    monkeypatch.setattr(slots, "PlacementGroupSchedulingStrategy", lambda *_: None)
    config = HostsConfig(private_files=private, log_dir="/fast/logs")
    maker = slots.AgentMaker(config, "run", driver_term=1, lease_s=1, log_dir="/logs", cache_dir="/cache", module="m")
    maker.create(SimpleNamespace(group=None, index=0), 0)
    assert made[0]["private_files"] is private
    assert made[0]["local_log_dir"] == "/fast/logs"


def recording(made):
    return SimpleNamespace(remote=lambda *arguments, **about: made.append(about))

"""What the user's code forks never speaks for the host, whatever becomes of it."""

from __future__ import annotations

from tests.multihost import harness
from trainers.config.arguments import TrainingArguments


def test_of_a_host_and_its_forks_the_host_alone_reports(tmp_path):
    arguments = TrainingArguments(
        name="forking", storage=str(tmp_path), max_num_steps=5, trainer="tests.programs.forking:Trainer", global_batch_size=2
    )
    (host,) = harness.run(arguments, tmp_path, hosts=1, devices_per_host=1)
    assert [event["step"] for event in host.of("metrics")] == [1, 2, 3, 4, 5]
    assert len(host.of("done")) == 1
    assert not host.of("exception")
    ended = [line for line in host.child.log_tail() if line.endswith(tuple("0123456789"))]
    assert ended[-5:] == ["raises 256", "exits 768", "reports 0", "returns 0", "is terminated 15"]

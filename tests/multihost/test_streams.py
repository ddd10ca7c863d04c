"""Data without an index on two hosts: the same samples as on one; the end of one host's data is the end for all."""

from __future__ import annotations

from tests.multihost.harness import losses, result, run
from trainers.config.arguments import TrainingArguments, from_dict


def arguments(tmp_path, dataset):
    return from_dict(
        TrainingArguments,
        {
            "name": dataset,
            "storage": str(tmp_path),
            "task": "tests.programs.tiny:TableTask",
            "global_batch_size": 8,
            "max_num_steps": 100,
            "publish_every_steps": 1,
            "data": {"sequence_length": 8, "dataset": f"tests.programs.streams:{dataset}"},
            "optimizer": {"schedule": {"decay_steps": 20}},
            "evaluation": {"max_batches": 1},
        },
    )


def test_where_the_data_of_one_host_ends_training_ends_on_all_with_the_same_samples(tmp_path):
    one = run(arguments(tmp_path, "even"), tmp_path / "one", hosts=1, devices_per_host=2)[0]
    two = run(arguments(tmp_path, "uneven"), tmp_path / "two", hosts=2, devices_per_host=1)
    for host in (one, *two):
        assert host.wait_for("done")["stop_reason"] == "end_of_data"
        assert result(host)["steps"] == 9
        assert result(host)["samples"] == 70
        assert result(host)["samples_digest"] == result(one)["samples_digest"]
    assert losses(two[0]).keys() == losses(one).keys()

"""What a publish brings beside the numbers of the step."""

import jax

from tests.unit.training import of, trainer


def test_the_memory_of_the_devices_of_this_host_is_published(tmp_path, events, monkeypatch):
    asked = []

    def memory(devices):
        asked.append(list(devices))
        return {"device_memory_bytes": len(asked)}

    monkeypatch.setattr("trainers.loop.metrics_reporter.device_memory", memory)
    made = trainer(tmp_path, max_num_steps=4, publish_every_steps=2, checkpoint={"save_at_end": False})
    made.train()
    published = [event["metrics"] for event in of(events, "metrics") if "loss" in event["metrics"]]
    assert [metrics["device_memory_bytes"] for metrics in published] == [1, 2]
    assert asked == [jax.local_devices()] * 2
    assert made.output.metrics["train_loss"] == published[-1]["loss"]  # the last ones are kept

"""In the means of an evaluation each source of a mixture counts by its weight, whatever is held out of it."""

from __future__ import annotations

import pytest

from tests.unit.training import OneDevice, arguments
from trainers.data.sources.text import text_windows
from trainers.trainer.beginnings import beginning

MODEL = {"vocab_size": 256, "width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 16}


def test_the_loss_of_an_evaluation_is_the_mean_of_the_sources_by_their_weights(tmp_path):
    (tmp_path / "large.jsonl").write_text('{"text": "all work and no play"}\n' * 400)
    (tmp_path / "small.jsonl").write_text('{"text": "\u00e4\u00f6\u00fc 0123456789 \u00e4\u00f6\u00fc"}\n' * 80)
    weights = {"large": 1.0, "small": 3.0}
    mixture = [{"name": name, "paths": [str(tmp_path / f"{name}.jsonl")], "weight": weight} for name, weight in weights.items()]
    made = arguments(
        tmp_path,
        task="trainers.tasks.causal_lm:CausalLMTask",
        model=MODEL,
        mesh={"data": 1},
        max_num_steps=1,
        data={
            "sequence_length": 16,
            "packing": "concat",
            "mixture": mixture,
            "eval_fraction": 0.2,
            "dataset": "trainers.data.sources.text:text_windows",
        },
    )

    trainer = OneDevice(made, *text_windows(made))
    trainer.prepare()
    metrics = trainer.evaluate(beginning(trainer).make())
    by_source = {name: metrics[f"loss/{name}"] for name in weights}
    assert by_source["large"] != pytest.approx(by_source["small"], rel=1e-3)
    # All rows of a source have about as many targets as those of the other.
    assert metrics["loss"] == pytest.approx((by_source["large"] + 3 * by_source["small"]) / 4, rel=2e-3)

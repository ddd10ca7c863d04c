"""Models in the form of MLflow: the folder that is written, and what predicts with it. Without MLflow itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml

from gangway.errors import UsageError
from tests.saved import saved
from tests.unit.trainers.commands.test_generate import asked, folder, run  # noqa: F401  fixtures
from tests.unit.trainers.text.test_tokenizers import cache  # noqa: F401  a fixture
from tests.unit.training import arguments
from trainers.base import BaseTrainer
from trainers.checkpoint import mlflow_model
from trainers.commands import export
from trainers.config.arguments import dataset_function
from trainers.export import to_mlflow
from trainers.pyfunc import _load_pyfunc, asked_for, texts_of


@pytest.fixture(scope="module")
def registered(run, tmp_path_factory):  # noqa: F811
    out = tmp_path_factory.mktemp("registered") / "mlflow"
    assert export.main([str(run), str(out), "--format", "mlflow"]) == 0
    return out


@pytest.mark.slow("trains, and compiles a decoder")
def test_a_language_model_continues_texts_as_the_run_does(run, registered, capsys):  # noqa: F811
    model = _load_pyfunc(str(registered / "model"))
    found = model.predict(["the gang", "a"], {"max_new_tokens": 6})
    given = ("--prompt", "the gang", "--prompt", "a", "--max-new-tokens", 6, "--json")
    assert found == [row["text"] for row in json.loads(asked(capsys, run, *given).out)]
    assert model.predict([]) == []


@pytest.mark.slow("loads a model in MLflow")
def test_the_folder_says_how_mlflow_loads_it(registered):
    about = yaml.safe_load((registered / "MLmodel").read_text())
    flavor = about["flavors"]["python_function"]
    assert (flavor["loader_module"], flavor["data"]) == ("trainers.pyfunc", "model")
    assert json.loads(about["signature"]["inputs"]) == [{"type": "string", "required": True}]  # MLflow takes a list of texts then
    assert {each["name"] for each in json.loads(about["signature"]["params"])} == set(asked_for({}))
    assert (registered / "requirements.txt").read_text().startswith("gangway==")
    assert (registered / "model" / "config.json").is_file()


def test_what_a_language_model_is_given_and_asked():
    class Table:
        columns = ("text",)

        def __getitem__(self, name):
            return np.array(["a", "b"])

    assert texts_of("a") == ["a"]
    assert texts_of(("a", "b")) == texts_of(np.array(["a", "b"])) == texts_of(Table()) == ["a", "b"]
    with pytest.raises(UsageError, match=r"^text 1 of the input is 3: expected a text$"):
        texts_of(["a", 3])
    Table.columns = ("text", "more")
    with pytest.raises(UsageError, match=r"^the input has the columns 'text', 'more': expected one, with texts$"):
        texts_of(Table())
    with pytest.raises(UsageError, match=r"^params\['temprature'\] = 1: expected one of max_new_tokens, temperature, "):
        asked_for({"temprature": 1})


@pytest.mark.slow("trains, and compiles a model")
def test_a_classifier_tells_the_labels_of_texts(tmp_path):
    rows = [{"text": "aaaa", "label": "good"}, {"text": "zzzz", "label": "bad"}] * 16
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = arguments(
        tmp_path,
        task="trainers.tasks.classification:ClassificationTask",
        model={"width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 16},
        classification={"labels": ["bad", "good"]},
        data={"sequence_length": 8, "paths": [str(tmp_path / "rows.jsonl")]},
        optimizer={"learning_rate": 0.03, "schedule": {"name": "constant"}},
        previews={"prompts": []},
        evaluation={"max_batches": 1},
        max_num_steps=12,
    )
    trained = BaseTrainer(settings, *dataset_function(settings)(settings))
    trained.train()
    to_mlflow(trained.output.checkpoint_path, tmp_path / "out")
    about = yaml.safe_load((tmp_path / "out" / "MLmodel").read_text())
    assert about["signature"]["params"] is None
    model = _load_pyfunc(str(tmp_path / "out" / "model"))
    assert model.predict(["zzzz", "aaaa", "zzz"]) == ["bad", "good", "bad"]
    with pytest.raises(UsageError, match=r"^params = \{'seed': 1\}: a classifier has none; leave them out$"):
        model.predict("zzzz", {"seed": 1})


@pytest.mark.parametrize("task", ["reward:RewardTask", "image_classification:ImageClassificationTask", "pieces:PiecesTask"])
def test_a_model_that_predicts_nothing_from_a_text_is_refused_by_name(task):
    with pytest.raises(
        UsageError, match=rf"^task = 'trainers.tasks.{task}': MLflow is given models that predict texts or labels"
    ):
        mlflow_model.predicts(f"trainers.tasks.{task}")


def test_adapters_alone_are_refused(run, tmp_path):  # noqa: F811
    with pytest.raises(UsageError, match=r"^--adapter: MLflow loads whole models; "):
        to_mlflow(saved(run, 30), tmp_path / "out", adapter=True)

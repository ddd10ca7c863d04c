"""What `trainers.checkpoint.orbax_bucket` replaces in Orbax is there, and is still needed."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest
from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from trainers.checkpoint import orbax_bucket

STOCK = """
from orbax.checkpoint._src.serialization import tensorstore_utils as utils
print(utils._use_gcs_driver("gs://b/a"), utils._use_gcs_driver("s3://b/a"), utils._normalize_path("s3://b/a"))
"""


def test_orbax_itself_knows_google_alone():
    """In a process of its own: this one may have enabled buckets already. A new version that knows s3:// needs less of us."""
    told = subprocess.run([sys.executable, "-c", STOCK], check=True, capture_output=True, text=True).stdout.split()
    assert told == ["True", "False", "s3:/b/a"]


@pytest.mark.parametrize(
    ("module", "name", "parameters"),
    [
        (tensorstore_utils, "_use_gcs_driver", 1),
        (tensorstore_utils, "_normalize_path", 1),
        (gcs_utils, "get_kvstore_for_gcs", 1),
    ],
)
def test_what_is_replaced_is_there(module, name, parameters):
    assert len(inspect.signature(getattr(module, name)).parameters) == parameters
    # Called by its name in its module: an import of the function itself would go past what takes its place.
    users = inspect.getsource(importlib.import_module(tensorstore_utils.__name__))
    assert f"{name}(" in users


@pytest.mark.parametrize("name", ["_BASE_TS_CONTEXT", "_DEFAULT_OCDBT_TS_CONTEXT"])
def test_the_tables_that_get_limits_are_there(name):
    assert isinstance(getattr(tensorstore_utils, name), dict)


def test_a_bucket_of_s3_with_an_endpoint_has_a_region():
    given = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    assert orbax_bucket.kvstore("s3://b/runs/a", given) == {
        "driver": "s3",
        "bucket": "b",
        "path": "runs/a",
        "endpoint": "http://127.0.0.1:9",
        "aws_region": "us-east-1",
    }
    assert orbax_bucket.kvstore("s3://b/a", {}) == {"driver": "s3", "bucket": "b", "path": "a"}
    assert orbax_bucket.kvstore("s3://b/a", given | {"AWS_REGION": "eu-1"})["aws_region"] == "eu-1"


def test_a_path_keeps_the_two_slashes_of_its_scheme():
    assert orbax_bucket._normalized("s3://b/a/../c/") == "s3://b/c"
    assert orbax_bucket._normalized("/runs//a/") == "/runs/a"

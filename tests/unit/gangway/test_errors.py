"""What an error says about trying again: real texts and types of the runtime, of file systems, networks and stores."""

from __future__ import annotations

import errno
import http.client
import json
import socket
import ssl
import urllib.error

import jax
import pytest
import requests
import urllib3

from gangway.errors import (
    CheckpointError,
    CheckpointUnavailableError,
    CoordinatorError,
    DataError,
    DataMissingError,
    DataUnavailableError,
    TransientError,
    UsageError,
    kind_of,
    user_frame,
    user_traceback,
)
from gangway.foreign_errors import broken_device_in
from gangway.user_modules import load_object
from tests import ROOT

TEXTS = json.loads((ROOT / "tests/unit/data/runtime_errors.json").read_text())
"""Messages of JaxRuntimeError as users have reported them, by the kind that they are of."""


@pytest.mark.parametrize(("kind", "message"), [(kind, message) for kind in TEXTS for message in TEXTS[kind]])
def test_errors_of_the_runtime_by_their_text(kind, message):
    assert kind_of(jax.errors.JaxRuntimeError(message)) == {"kind": kind, "deterministic": False}


def test_an_error_of_the_compiler_looks_like_a_mistake_for_the_same_program_gives_it_again():
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        lowered.compile(compiler_options={"xla_no_such_option": True})
    assert kind_of(raised.value) == {"kind": "user", "deterministic": False, "mistake": True}
    for message, kind in (("UNIMPLEMENTED: PartitionId instruction is not supported", "user"), ("INTERNAL: failed", "runtime")):
        error = jax.errors.JaxRuntimeError(message).with_traceback(raised.value.__traceback__)
        assert kind_of(error) == {"kind": kind, "deterministic": False, "mistake": True}
    lost = jax.errors.JaxRuntimeError("UNAVAILABLE: connection reset by peer")
    assert "mistake" not in kind_of(lost.with_traceback(raised.value.__traceback__))


def test_a_machine_without_its_device_is_known_by_a_plain_runtime_error():
    message = "Unable to initialize backend 'tpu': INTERNAL: Failed to get global TPU topology. (set JAX_PLATFORMS='' ...)"
    assert kind_of(RuntimeError(message))["kind"] == "device"
    assert kind_of(RuntimeError("my backend failed"))["kind"] == "user"
    # A host that is missing makes the others wait for the topology in vain.
    late = "Unable to initialize backend 'cuda': DEADLINE_EXCEEDED: GetKeyValue() timed out with key: cuda:global_topology/cuda"
    assert kind_of(RuntimeError(late))["kind"] == "collateral"


def test_the_runtime_itself_says_so():
    def broken(x):
        raise ValueError("my data is bad")

    program = jax.jit(lambda x: jax.pure_callback(broken, jax.ShapeDtypeStruct((), "float32"), x))
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        program(1.0).block_until_ready()
    assert kind_of(caught.value)["kind"] == "user"


def test_a_broken_device_is_found_in_the_last_lines_of_a_process():
    fatal = "F0522 10:59:55 35984 pjrt.cc:3067] Non-OK-status: INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error"
    assert broken_device_in(["step 7", fatal, "bye"]) == fatal
    # What a CPU process prints in passing is not it.
    passing = "Unable to initialize backend 'cuda': FAILED_PRECONDITION: No visible GPU devices."
    assert broken_device_in(["step 7", passing, "failed call to cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device"]) is None


def foreign(package, name, base=Exception, **attributes):
    """An error as the library raises it, without the library."""
    error = type(name, (base,), {"__module__": f"{package}.exceptions"})("no answer")
    for attribute, value in attributes.items():
        setattr(error, attribute, value)
    return error


def grpc_error(name):
    status = type("StatusCode", (), {"name": name})()
    return type("_InactiveRpcError", (Exception,), {"__module__": "grpc._channel", "code": lambda self: status})()


def boto(status):
    return foreign("botocore", "ClientError", response={"ResponseMetadata": {"HTTPStatusCode": status}})


def http_error(status):
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError("no", response=response)


def raised_from(outer, inner):
    try:
        try:
            raise inner
        except Exception as error:
            raise outer from error
    except Exception as error:
        return error


def raised_while_handling(outer, inner):
    try:
        try:
            raise inner
        except Exception:
            raise outer  # noqa: B904 - as users do
    except Exception as error:
        return error


TRANSIENT = {
    "ours": TransientError("the data server is busy"),
    "no connection": ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
    "no connection, said by hand": ConnectionError("the data server does not answer"),
    "time-out": TimeoutError("no answer"),
    "a name that cannot be resolved": socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    "stale file handle": OSError(errno.ESTALE, "Stale file handle"),
    "no route": OSError(errno.EHOSTUNREACH, "No route to host"),
    "TLS": ssl.SSLError(1, "handshake"),
    "half an answer": http.client.IncompleteRead(b"half"),
    "urllib": urllib.error.URLError("refused"),
    "urllib, busy": urllib.error.HTTPError("http://x", 503, "busy", None, None),
    "requests": requests.ConnectionError("refused"),
    "requests, time-out": requests.ReadTimeout("slow"),
    "requests, too many": http_error(429),
    "urllib3": urllib3.exceptions.ProtocolError("broken"),
    "aiohttp": foreign("aiohttp", "ClientPayloadError"),
    "aiohttp, status": foreign("aiohttp", "ClientResponseError", status=502),
    "httpx": foreign("httpx", "TransportError"),
    "gcsfs": foreign("gcsfs", "HttpError", code=503),
    "google": foreign("google", "ServiceUnavailable", code=http.HTTPStatus.SERVICE_UNAVAILABLE),
    "google, authentication": foreign("google", "TransportError"),
    "boto": foreign("botocore", "HTTPClientError"),
    "boto, slow down": boto(503),
    "gRPC": grpc_error("UNAVAILABLE"),
    "wrapped": raised_from(RuntimeError("shard 17 could not be loaded"), ConnectionResetError(errno.ECONNRESET, "reset")),
    "raised while it was handled": raised_while_handling(RuntimeError("no shard"), requests.ConnectionError("refused")),
}
LOOKS_LIKE_A_MISTAKE = {
    "no such file": FileNotFoundError(errno.ENOENT, "No such file"),
    "not allowed": PermissionError(errno.EACCES, "Permission denied"),
    "not allowed by the store": boto(403),
    "no such page": http_error(404),
    "no such object": grpc_error("NOT_FOUND"),
}


@pytest.mark.parametrize("name", TRANSIENT)
def test_what_comes_from_outside_may_go_away(name):
    assert kind_of(TRANSIENT[name]) == {"kind": "transient", "deterministic": False}


@pytest.mark.parametrize("name", LOOKS_LIKE_A_MISTAKE)
def test_a_path_that_is_not_there_may_be_a_mistake_or_a_mount_that_went_away(name):
    assert kind_of(LOOKS_LIKE_A_MISTAKE[name]) == {"kind": "transient", "deterministic": False, "mistake": True}


def test_data_that_cannot_be_read_just_now():
    assert kind_of(DataUnavailableError("stale")) == {"kind": "data", "deterministic": False}
    missing = kind_of(DataMissingError("data.paths: '/mnt/date' does not exist"))
    assert missing == {"kind": "data", "deterministic": False, "mistake": True}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_errors_of_the_storage(number):
    assert kind_of(OSError(number, "no")) == {"kind": "storage", "deterministic": False}


def test_checkpoints_that_cannot_be_read_just_now():
    assert kind_of(CheckpointUnavailableError("the folder is not there")) == {"kind": "storage", "deterministic": False}


@pytest.mark.parametrize(
    ("error", "kind"), [(UsageError("no"), "user"), (DataError("no"), "data"), (CheckpointError("no"), "user")]
)
def test_what_does_not_fit_will_never_fit(error, kind):
    assert kind_of(error) == {"kind": kind, "deterministic": True}
    # Whatever it was raised from.
    assert kind_of(raised_from(error, ConnectionError("no")))["deterministic"]


@pytest.mark.parametrize(
    "error",
    [TypeError("no"), KeyError("no"), ModuleNotFoundError("no"), ValueError("no"), requests.exceptions.InvalidURL("no host")],
)
def test_errors_that_python_raises_when_a_program_is_wrong(error):
    assert kind_of(error) == {"kind": "user", "deterministic": False, "mistake": True}


class ServerSaidNo(Exception):
    """Of a user's own client."""


@pytest.mark.parametrize("error", [RuntimeError("no"), ServerSaidNo("no"), OSError("cannot identify image file")])
def test_an_error_whose_type_says_nothing(error):
    assert kind_of(error) == {"kind": "user", "deterministic": False}


def test_an_error_whose_attributes_raise_is_reported_all_the_same():
    class Strange(Exception):
        @property
        def response(self):
            raise RuntimeError("there is none")

    assert kind_of(Strange("no")) == {"kind": "user", "deterministic": False}


def test_a_chain_that_goes_round_ends():
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert kind_of(first)["kind"] == "user"


def test_the_failure_of_another_host():
    assert kind_of(CoordinatorError("no answer from host 2"))["kind"] == "collateral"
    json.dumps(kind_of(CoordinatorError("no answer")))


# ---------------------------------------------------------------------- where in the user's code


def raised_by(work) -> BaseException:
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError


def test_the_frame_of_an_error_is_the_users_however_deep_the_library_that_raised_it():
    frame = user_frame(raised_by(lambda: json.loads("{")))
    assert frame is not None
    assert frame.startswith(f"{__file__}, line ")
    assert frame.endswith('in <lambda>: frame = user_frame(raised_by(lambda: json.loads("{")))')


def fails():
    raise KeyError("first")


def of_another(*, explicit: bool):
    try:
        fails()
    except KeyError as error:
        if explicit:
            raise RuntimeError("second") from error
        raise RuntimeError("second")  # noqa: B904


def test_of_errors_raised_from_each_other_the_first_counts_and_of_those_in_a_handler_the_last():
    assert user_frame(raised_by(lambda: of_another(explicit=True))).endswith('in fails: raise KeyError("first")')
    assert user_frame(raised_by(lambda: of_another(explicit=False))).endswith('raise RuntimeError("second")  # noqa: B904')


def test_the_users_traceback_has_the_lines_of_the_users_alone_of_each_error_of_a_chain():
    lines = user_traceback(raised_by(lambda: of_another(explicit=True))).splitlines()
    files = [line.split('"')[1] for line in lines if line.startswith("  File ")]
    assert files == [__file__] * 5  # of_another and fails; raised_by, the lambda and of_another
    assert [line for line in lines if not line.startswith(" ")] == [
        "Traceback (most recent call last):",
        "KeyError: 'first'",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        "Traceback (most recent call last):",
        "RuntimeError: second",
    ]
    told = user_traceback(raised_by(lambda: json.loads("{")))
    assert "json/decoder.py" not in told

    def of_a_library():
        try:
            json.loads("{")
        except ValueError as error:
            raise RuntimeError("second") from error

    chained = user_traceback(raised_by(of_a_library))
    assert chained.count("  File ") == chained.count(f'  File "{__file__}"') == 3
    assert told.splitlines()[-1].startswith("json.decoder.JSONDecodeError: ")
    assert user_traceback(ValueError("raised by nobody")) == ""


def test_an_error_that_never_was_in_the_users_code_has_no_frame(tmp_path, monkeypatch):
    def ours():
        load_object("nowhere:Task")

    error = raised_by(ours)
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # without this file
    assert user_frame(error) is None
    # Its own cause goes round in a circle.
    error.__cause__.__context__ = error
    assert user_frame(error) is None
    (tmp_path / "unfinished.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    error = raised_by(lambda: load_object("unfinished:f"))
    assert user_frame(error) == f"{tmp_path}/unfinished.py, line 1: def f(:"
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "installed.py").write_text("raise OSError(5, 'an installed package')\n")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    error = raised_by(lambda: load_object("installed:f"))
    error.__traceback__ = error.__traceback__.tb_next.tb_next
    assert user_frame(error) is None

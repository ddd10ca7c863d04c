"""What the tests see of the machine: nothing that a user has set, kept or started.

A setting of the user's shell (`RAY_ADDRESS`, `XLA_FLAGS`, keys of a cloud), a file of the home folder, or a Ray of somebody else
would change what a test measures. So the environment is cleared of them, and the home folder is an empty one below `build/`.
Ray's sockets are in a folder of the temporary folder: their paths must be short.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from gangway.surroundings import CPU_THREADS_PER_DEVICE, IN_ORDER
from tests import ROOT

NUM_DEVICES = 8
BUILD = ROOT / "build" / "tests"
CACHE = "TESTS_CACHE"
"""Names the folder of what was compiled, in what these tests start."""
LEDGER = "TESTS_LEDGER"
"""Names another folder for the ledger: of a file that is run once more, alone, and of a pytest that a test starts. What that one
costs is charged to the test."""
PREPARED = "TESTS_PREPARED"
"""Set in what these tests start: it keeps the environment of the one process that prepared it."""
OF_THE_USER = (
    *("RAY_", "JAX_", "XLA_", "TPU_", "MEGASCALE_", "CUDA_", "NVIDIA_", "GANGWAY_", "MLFLOW_", "WANDB_", "TENSORBOARD_"),
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "AWS_", "GOOGLE_", "GCLOUD_", "CLOUDSDK_", "GCE_", "AZURE_"),
    *("XDG_", "SLURM_", "OMPI_", "PMI_", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"),
)
"""How the names begin of the variables that a test must not see."""
OF_PYTHON = ("NPROC", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "OPENBLAS_NUM_THREADS")
"""Others. Without bytecode that is kept, each process that a test starts would compile all our modules."""
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:hypothesispytest")
"""Without Hypothesis' plugin, of which the tests need nothing. It imports Hypothesis when all tests have ended, and pytest then
parses its files while other threads run. A thread that prints a traceback parses too. If JAX's callback of the garbage collector
lets it do so in between, Python 3.11 raises SystemError: AST constructor recursion depth mismatch."""
QUICK_TO_COMPILE = ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")
"""Flags with which XLA compiles for a processor in half the CPU-seconds: the emitters of today lower each fusion by MLIR."""
XLA_FLAGS = (
    *QUICK_TO_COMPILE,
    # As every training process has it. Without it a step that accumulates gradients hung here too, once in some runs.
    IN_ORDER,
    f"--xla_force_host_platform_device_count={NUM_DEVICES}",
    # Default 40 s: on a machine that does much else, XLA would abort the process while some devices wait for the others.
    "--xla_cpu_collective_call_terminate_timeout_seconds=300",
)
NO_CLOUD = {
    # A client of a cloud finds no keys and no metadata server, and no hub: at once, not after a timeout.
    "AWS_ACCESS_KEY_ID": "none",
    "AWS_SECRET_ACCESS_KEY": "none",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_METADATA_ENDPOINT": "http://127.0.0.1:9",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "GCE_METADATA_HOST": "127.0.0.1:9",
    "GCE_METADATA_ROOT": "127.0.0.1:9",
    "GCE_METADATA_IP": "127.0.0.1:9",
    "NO_GCE_CHECK": "true",
    "HF_HUB_OFFLINE": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_MODE": "offline",
}


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Returns where what the tests have compiled is kept, for other clones too: `$GANGWAY_TESTS_CACHE`, or a folder in the user's
    cache. Other libraries, another Python and another kind of processor have another folder in it."""
    home = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "/nonexistent") / ".cache")
    folder = Path(environ.get("GANGWAY_TESTS_CACHE") or home / "gangway-tests")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = BUILD / "cache"
    return folder / cache_key((ROOT / "requirements.lock").read_bytes(), sys.version, Path("/proc/cpuinfo").read_text())


def cache_key(lock: bytes, python: str, processors: str) -> str:
    features = next((line for line in processors.splitlines() if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(b"\0".join((lock, python.encode(), features.encode()))).hexdigest()[:16]


def prepare(environ: MutableMapping[str, str]) -> None:
    """Clears the environment of this process of the user's settings, once, before JAX and Ray read it."""
    if environ.get(PREPARED):
        return
    cache = cache_folder(environ)
    for name in [name for name in environ if name.startswith(OF_THE_USER) or name in OF_PYTHON]:
        del environ[name]
    sys.dont_write_bytecode = False
    if "numpy" not in sys.modules:  # a thread of its products would run when the workers are forked
        environ["OPENBLAS_NUM_THREADS"] = "1"
        importlib.import_module("numpy")
        del environ["OPENBLAS_NUM_THREADS"]
    BUILD.mkdir(parents=True, exist_ok=True)
    home = _temporary(prefix="home-", folder=BUILD)
    environ.update(
        NO_CLOUD,
        HOME=home,
        JAX_PLATFORMS="cpu",
        XLA_FLAGS=" ".join(XLA_FLAGS),
        # As JAX's own tests are compiled: most time of a test goes into compiling, and its steps are small.
        JAX_DISABLE_MOST_OPTIMIZATIONS="1",
        RAY_USAGE_STATS_ENABLED="0",
        # Default 15. With anything else on the machine, Ray's workers, and what they start, would wait for it until limits pass.
        RAY_worker_niceness="0",
        RAY_TMPDIR=_temporary(prefix="gw-", folder=Path(tempfile.gettempdir())),
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(32),  # of all Rays that the tests start
    )
    environ[CACHE] = str(cache)
    environ[LEDGER] = f"{home}/ledger"
    environ[PREPARED] = home


def as_users_compile(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables with which what a test starts is compiled as what users start."""
    flags = [flag for flag in environ["XLA_FLAGS"].split() if flag not in QUICK_TO_COMPILE]
    return {"XLA_FLAGS": " ".join(flags), "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}


def start_jax() -> None:
    """Starts JAX in this process, with threads enough for all of its devices. XLA reads NPROC once, and what the tests start has
    its own."""
    import jax

    before = os.environ.get("NPROC")
    os.environ["NPROC"] = str(CPU_THREADS_PER_DEVICE * NUM_DEVICES)
    jax.devices()
    del os.environ["NPROC"]
    if before is not None:
        os.environ["NPROC"] = before


def _temporary(prefix: str, folder: Path) -> str:
    """A new folder that is gone when this process has ended."""
    made = tempfile.mkdtemp(prefix=prefix, dir=folder)
    atexit.register(_remove, made, os.getpid())
    return made


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)

"""Tests: unit (one process), multihost (real `jax.distributed`), ray (real Ray), faults (whole jobs that are broken)."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The folder of the project."""
PACKAGES = ("gangway", "trainers", "cluster", "orchestrator")
"""Those of the product."""

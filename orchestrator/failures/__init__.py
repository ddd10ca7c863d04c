"""Failures: the evidence from all hosts becomes one typed failure. Pure functions."""

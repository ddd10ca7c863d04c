"""Placement groups, TPU slices and bundles: what a run holds in Ray, and its clean-up."""

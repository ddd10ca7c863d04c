"""Estimates of what a run needs, without touching a device."""

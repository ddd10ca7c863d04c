"""Numbers of a run: summed on the device, published once an interval."""

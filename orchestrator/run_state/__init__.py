"""The state of a run that outlives one driver: lease, launches, incidents, goodput."""

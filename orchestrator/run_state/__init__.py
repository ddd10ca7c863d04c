"""What a run knows beyond the life of one driver: its lease, launches, incidents and goodput."""

"""What a run will need, worked out without touching a device."""

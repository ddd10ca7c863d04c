"""What people see of a run: the console and its texts."""

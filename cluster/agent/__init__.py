"""The agent of one host, and all it keeps on its machine: training process, standby, watchdog, logs."""

"""The driver: configuration, generations, recovery, ledgers, tracking, commands. Decides, never computes."""

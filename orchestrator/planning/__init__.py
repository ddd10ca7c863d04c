"""The dry run: what a job will be, before a machine is taken."""

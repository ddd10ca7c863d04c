"""The console of a run: a live view on a terminal, plain lines elsewhere. With the orchestrator and without it."""

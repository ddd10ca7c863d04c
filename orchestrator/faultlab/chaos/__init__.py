"""`python -m orchestrator.chaos`: injects faults into a real run, and scores what comes of them."""

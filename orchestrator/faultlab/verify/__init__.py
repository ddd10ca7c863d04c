"""`python -m orchestrator.verify`: proves on a user's configuration that training can be resumed."""

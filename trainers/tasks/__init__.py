"""Tasks: what is learnt, from what, by which loss."""

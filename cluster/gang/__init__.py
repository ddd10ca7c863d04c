"""The gang: one agent on each machine. It is reserved, commanded, repaired, and adopted by the next driver."""

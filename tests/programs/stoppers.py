"""When to stop early, for tests."""

import jax


def host0_at_step_four(step: int, score: float) -> bool:
    """What one host alone knows: were each host to ask for itself, the others would go on."""
    return jax.process_index() == 0 and step >= 4

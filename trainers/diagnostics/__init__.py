"""Why training went wrong (non-finite values, memory), and faults injected on purpose."""

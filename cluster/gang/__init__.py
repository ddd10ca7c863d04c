"""One agent on each machine: reserved, led, repaired, adopted by the next driver."""

"""The training loop: when it saves and stops, what hosts ask of each other, rollback, restore."""

"""What processes tell each other: orders, answers, events, each with its schema."""

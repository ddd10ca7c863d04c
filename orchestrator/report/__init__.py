"""A page about a run, or about several beside each other: one file of HTML that needs no network."""

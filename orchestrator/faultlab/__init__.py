"""The fault laboratory: faults on purpose (`chaos`), the proof of exact resume (`verify`), and the real runs that they disturb
(`testbed`)."""

"""Stores for tests, on 127.0.0.1, in threads of the process of the test: they end with it, whatever ends it."""

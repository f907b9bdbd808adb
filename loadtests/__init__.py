"""Load tests: `__main__` has the commands, `support` the shared parts, README.md the figures."""

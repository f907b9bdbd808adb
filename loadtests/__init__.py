"""Load tests: one module a command; `support` has their shared parts, README.md the figures."""

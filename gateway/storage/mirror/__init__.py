"""Mirrors: remote repositories on the local disk, as folders that backends read."""

"""Shared memory of clients.

`regions` registers, reads and writes them, `system` is a part of POSIX shared memory, `cuda` a
part of GPU memory.
"""

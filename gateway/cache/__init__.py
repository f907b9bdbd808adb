"""The response cache.

`cache` is the interface with keys and encoding, `local` keeps responses in this process, `redis`
in a Redis server.
"""

"""The response cache.

`cache` has the interface, keys and encoding, and keeps responses in this process; `redis` keeps
them in a Redis server.
"""

"""Models that replicas on other machines host.

In reading order:

- `choice`: loads of replicas, and the choice of one by its cost in seconds
- `prefixes`: keys of prompts and pins, the keys that a replica holds, and the index of a router
"""

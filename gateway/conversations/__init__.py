"""Conversations of ModelStreamInfer and `generate`.

`conversations` finds them by correlation id and queues the turns of each, `turn` is one request
with its answer, `history` holds messages within a memory budget, `copies` those of conversations
at other replicas of a fleet.
"""

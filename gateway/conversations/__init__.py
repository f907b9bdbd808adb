"""Conversations of ModelStreamInfer and `generate`.

`conversations` finds them by correlation id, `conversation` queues the turns of one, `turn` is one
request with its answer, `history` holds messages within a memory budget.
"""

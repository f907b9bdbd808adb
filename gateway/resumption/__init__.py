"""Streams that a client can resume, and requests that it can repeat.

`recordings` finds recordings by token or key, `recording` keeps the responses of one stream
and has the keys of repeated requests, `reader` reads a recording from an event on.
"""

"""The check of a machine with a GPU.

`parts` has the packages of each part, `check` runs the parts; `tensors`, `devices` and `llm` have
their checks.
"""

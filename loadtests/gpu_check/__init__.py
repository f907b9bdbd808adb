"""The check of a machine with a GPU.

`check` runs the `parts`, `processes` one of them, `outcome` is its verdict; each other module is a
part, or its model.
"""

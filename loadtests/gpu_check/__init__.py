"""The check of a machine with a GPU.

`check` runs the `parts`, `outcome` has the process and the verdict of one; each other module is a
part, or its model.
"""

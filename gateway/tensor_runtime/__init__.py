"""Instances of runtimes that compute output tensors from input tensors.

- `instance`: the instance, with one blocking method for a runtime to implement; its thread, and
  the choice between it and the event loop
"""

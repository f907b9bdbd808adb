"""Runtimes that compute output tensors from input tensors: what all of them share.

- `signature`: the inputs and outputs that a model file declares
- `completion`, `checks`: a config completed from them, and checked against them
- `parameters`: numbers, switches, and the threads of an instance
- `model_files`: files that a config names, and the state of those of a version
- `failures`: exceptions of a library, in one line
- `instance`: the instance, with one blocking method for a runtime to implement; its thread, and
  the choice between it and the event loop
"""

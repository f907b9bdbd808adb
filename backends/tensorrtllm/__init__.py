"""LLMs by TensorRT-LLM's LLM API, each engine in a worker process of the Python backend.

Read in this order: `backend` completes configs with its tensors, `instance` adds usage and stops,
`worker` is the program in the worker process.
"""

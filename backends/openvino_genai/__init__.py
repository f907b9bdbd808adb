"""LLMs on CPUs by OpenVINO GenAI, each engine in a worker process of the Python backend.

Read in this order: `backend` completes configs with the tensors of LLMs, `worker` is the program
in the worker process.
"""

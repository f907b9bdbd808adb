"""Programs (`model.py`), each instance in a worker process of its own.

Read in this order:
`backend` loads a model: `loading` has its limits and messages. `environments` chooses its Python,
with `environment_builds`. `instance` has a worker and executes requests: `worker_process` starts
and watches it, `connection` has its sockets, `executions` are those of one worker, each an
`execution`; `codec` writes and reads them. `services` are a model's calls: `business_logic`,
`metrics`. `worker` is the program in the worker process.
"""

"""Programs (`model.py`), each instance in a worker process of its own.

Read in this order:
`backend` loads a model: `loading` has its limits and messages. `environments` chooses its Python,
with `environment_builds`. `worker_process` is a worker's process, `connection` its sockets,
`running_worker` both. `instance` executes requests: `executions` of one worker, each an
`execution` with the quarantine; `codec` writes and reads them. `services` are a model's calls:
`business_logic`, `metrics`. `worker` is the program in the worker process.
"""

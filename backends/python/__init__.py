"""Programs (`model.py`), each instance in a worker process of its own.

Read in this order:
`backend` loads a model: `parameters` are its limits, `load_messages` its arguments.
`environments` chooses its Python; `environment_builds` makes one, with `environment_commands`.
`running_worker` is a worker: `worker_process`, `connection` to it, its `health`, `worker_output`.
`instance` executes requests: `executions` of one worker, each an `execution`; `prefetch` sends
one early, `quarantine` refuses those that end workers, `codec` writes and reads them.
`services` are a model's calls: `business_logic`, `model_management`, `metrics`.
`worker` is the program in the worker process.
"""

"""The program of a worker process; it needs Python's library and numpy only.

Read in this order:
`process` is the main loop and the socket for urgent messages, `protocol` the frames, messages and
shared memory. `connection` has the sockets; `work` reads executions and has the process's state.
`executions` calls `execute`; `open_requests` are its requests, with their response senders.
`request`, `response`, `tensor` (with `dlpack`) and `errors` are model.py's objects.
`business_logic`, `observability`, `model_config` are the rest of its API.
"""

"""The program of a worker process; it needs Python's library and numpy only.

Read in this order:
`process` is the main loop, `protocol` its messages, `worker_state` its state.
`connection` has the sockets and `segments`; `work` and `control` read them.
`executions` calls `execute`; `open_requests` are its requests, with their response senders.
`request`, `response`, `tensor` (with `dlpack`, `datatypes`) and `errors` are model.py's objects;
`packing` writes them into messages.
`business_logic`, `model_management`, `metrics`, `model_config`, `logger` are the rest of its API.
"""

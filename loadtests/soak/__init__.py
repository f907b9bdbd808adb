"""The soak: random clients, reloads and kills.

`soak` is one run, `storm` the clients, reloads and kills, `http_clients` and `grpc_clients` the
actions, `requests` questions and checks, `models` and `programs` the repository, `server` the
process, `census` its contents and tasks, `probe` its latency.
"""

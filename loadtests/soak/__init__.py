"""The soak: random clients, reloads and kills.

`soak` is one run, `storm` the clients, `disturbances` the reloads and kills, `http_clients` and
`grpc_clients` the actions, `requests` questions and checks, `models` and `programs` the repository,
`server` the process, `census` its contents, `dumping` its tasks, `probe` its latency.
"""

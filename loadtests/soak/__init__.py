"""The soak: random clients, reloads and kills.

`soak` is one run, `storm` the clients, reloads and kills, `http_clients` and `grpc_clients` the
acts, `requests` questions and checks, `models` the models, `server` the process and a census of
its contents, `probe` its latency.
"""

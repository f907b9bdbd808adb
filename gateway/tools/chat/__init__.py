"""The command `sluice chat`.

`command` (connect and choose a model), `options`, `terminal` (prompt and keyboard),
`slash_commands`, `conversation`, `answer` (display), `server` (the client's contract),
`grpc_server` and `http_server` (its two protocols).
"""

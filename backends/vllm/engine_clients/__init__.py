"""Engines with several client processes.

In reading order:

- `instance`: the instance, and its opening
- `shared_engine`: the processes of the engine
- `remote_client`: a client as the server sees it
- `call`: both ends of one request
- `messages`: kinds of frames, requests, responses, errors, log records
- `client`: the client process
"""

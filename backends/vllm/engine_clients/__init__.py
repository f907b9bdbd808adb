"""Engines with several client processes.

In reading order:

- `instance`: the instance, and its opening
- `shared_engine`: the processes of the engine, and the clients as the server sees them
- `messages`: kinds of frames, settings, offers, log records
- `client`: the client process
"""

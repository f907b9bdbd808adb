"""Frontend processes (`--frontends N`) and the channel between processes.

In reading order:

- `module_commands`: commands of processes
- `channel`: frames, and calls with their windows
- `inference_messages`: requests, responses and errors as bytes
- `malformed`: the errors of bytes that are none
- `inference_calls`: both ends of a call that carries a request, and its responses back
- `messages`: kinds of frames and heads of requests
- `supervisor`: frontend processes as the server starts and restarts them
- `listeners`: their listeners as the server sees them
- `frontend`: a frontend process
- `relayed_call`: a call that the server answers
- `http`: both ends of HTTP requests
- `grpc`: both ends of RPCs
"""

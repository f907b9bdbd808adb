"""The program that runs an engine of TensorRT-LLM in a worker of the Python backend.

Read in this order:
`model` is the model.py: it reads the `model_file`, starts the `engine` and has its event loop.
`service` executes a request: `request` reads tensors, `aborts` watches disconnects, `deltas` reads
the engine's outputs, `outputs` makes responses of them.
`openai_request` and `openai_response` do so for OpenAI's clients, with `messages` and `parsers`.
`metrics` are the engine's; `errors` are refusals.
"""

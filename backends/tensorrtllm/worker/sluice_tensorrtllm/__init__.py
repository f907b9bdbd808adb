"""The program that runs an engine of TensorRT-LLM in a worker of the Python backend.

Read in this order:
`model` is the model.py: it reads the `model_file`, starts the `engine` and has its event loop.
`service` executes a request and watches disconnects: `request` reads tensors and refuses, `deltas`
reads the engine's outputs, `responses` makes tensors and OpenAI's JSON of them.
`openai_request` reads OpenAI's requests, `chat` their messages and the answer's calls and thoughts.
`metrics` are the engine's.
"""

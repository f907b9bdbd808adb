"""The program that runs an engine of TensorRT-LLM in a worker of the Python backend.

Read in this order:
`model` is the model.py: it reads the `model_file` and starts the `engine`. `service` executes a
request: `request` reads its tensors, `deltas` the engine's outputs. `parsers` are the library's
for the text of chats, `metrics` the engine's. `sluice_llm` has the rest.
"""

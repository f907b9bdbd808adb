"""The program that runs an engine of OpenVINO GenAI in a worker of the Python backend.

Read in this order:
`model` is the model.py: it reads the `model_file` (with `gguf_header`) and starts the `engine`.
`service` adds requests to it: `request` reads tensors, `sampling` parameters, `tokens` texts;
`structures` checks JSON schemas and grammars, with `pattern_size` and the process `compiling`.
`loop` steps the engine, and `generation` reads the new tokens of a request, with `stops`. `metrics`
are the engine's. `sluice_llm` has the rest.
"""

"""LLMs on vLLM, with the contract of Triton's vLLM backend.

In reading order:

- `backend`: the backend, without an import of vLLM
- `settings`: `model.json`, parameters of the config, LoRA adapters
- `opening`: loading of a model
- `engine`: start and stop of the engine
- `engine_processes`: their exit with the server, their errors, their end
- `instance`: requests executed by the engine
- `prompts`: prompts of requests, rendered by vLLM
- `engine_request`: one request in the engine: outputs, abort
- `diverted_deltas`: text deltas from the engine's steps, without vLLM's objects and tasks
- `sleeper`: vLLM's sleep levels, for models that do not fit together
- `token_texts`: texts of single tokens, without a decoder
- `sampling`: sampling parameters
- `grammar_time`: limits on schemas and on the time that grammars take
- `failures`: errors of vLLM and of pydantic
- `metrics`: metrics of one engine
- `queue_limits`: the limits for which its requests wait
- `machine`: plugins of vLLM for CPUs and for its usage reports
- `serving/`: OpenAI's requests
- `engine_clients/`: engines with several client processes
"""

"""Parts of programs that run an LLM engine in a worker of the Python backend.

Read in this order:
`program` has the event loop of a model.py, `running` the requests in the engine. `request` reads
inputs and refuses, `openai_request` OpenAI's requests, `chat` their messages. `deltas` are the new
text of a step, `responses` the tensors and OpenAI's JSON of them. `metrics` count tokens.
"""

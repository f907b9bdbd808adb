"""OpenAI's requests, answered by vLLM's own handlers.

In reading order:

- `serving`: requests, answers and streams; how the handlers are created
- `endpoints`: the body, limits and handler of each endpoint
- `exchange`: the engine as the handlers see it during one request
- `refusals`: errors in OpenAI's form
"""

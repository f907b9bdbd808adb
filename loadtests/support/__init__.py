"""Shared parts of the load tests.

`servers` starts and stops servers and reads their processes, `rounds` interleaves measurements,
`results` has figures as tables and files; `http_client` and `stream_client` are clients,
`generation` has streams of an LLM, `triton` comparisons with Triton, `curves` curves over time.
"""

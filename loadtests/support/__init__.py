"""Shared parts of the load tests.

`servers` starts and stops them, `rounds` interleaves the measurements and keeps the figures;
`http_client`, `stream_client` and `perf_analyzer` are clients, `generation` has streams of an LLM,
`texts` and `repositories` are inputs.
"""

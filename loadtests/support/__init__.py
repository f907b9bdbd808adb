"""Shared parts of the load tests.

`servers` starts and stops them, `rounds` interleaves the measurements, `results` keeps the figures;
`http_client`, `grpc_clients`, `stream_client` and `perf_analyzer` are clients, `generation` has
streams of an LLM, `texts`, `repositories`, `vllm_flags` and `encoder_session` are inputs and peers.
"""

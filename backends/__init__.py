"""Backends: adapters of runtimes, each named in the table of `gateway.backend_loader`.

`identity` and `repeat` are the smallest. `onnxruntime`, `pytorch` and `tensorrt` run tensors;
`python` runs programs, `tensorrtllm` on top of it and `vllm` run LLMs.
"""

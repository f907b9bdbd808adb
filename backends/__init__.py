"""Backends: adapters of runtimes, found by entry points of the group `sluice.backends`.

`identity` and `repeat` are the smallest. `onnxruntime`, `pytorch` and `tensorrt` run tensors;
`python` runs programs, `tensorrtllm` on top of it and `vllm` run LLMs.
"""

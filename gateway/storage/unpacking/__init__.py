"""Conversion of the files of pip packages to stored models.

`process` (owner and process), `gguf`, `light_onnx`, `sentence_encoder` (one module per kind).
"""

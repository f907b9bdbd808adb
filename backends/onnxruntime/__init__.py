"""ONNX models by ONNX Runtime.

Read in this order: `backend` loads a model, `model_file` reads its tensors, `session` opens it with
`providers`, `instance` runs it, `parameters` has threads and cores, `library` imports the library.
What is not about ONNX is in `gateway.tensor_runtime`.
"""

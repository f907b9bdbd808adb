"""ONNX models by ONNX Runtime.

Read in this order: `backend` loads a model, `model_file` finds its file and tensors, `checks`
completes and checks its config, `session` opens it with `providers`, `instance` runs it,
`parameters` reads numbers, threads and cores.
"""

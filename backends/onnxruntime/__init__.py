"""ONNX models by ONNX Runtime.

Read in this order: `backend` loads a model, `model_file` finds its file, `signature` has its
tensors, `checks` completes and checks its config, `session` opens it with `providers` and
`threads`, `instance` runs it, `parameters` reads settings, `failures` translates errors.
"""

"""Models of PyTorch.

Read in this order: `backend` loads a model, `model_file` finds its file and kind and translates
errors, `torchscript`, `exported` and `inductor` are the three kinds of programs, `signature` has
their tensors, `checks` completes and checks configs, `instance` runs a program with `tensors`,
`parameters` reads settings and shares threads.
"""

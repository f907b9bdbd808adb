"""The program that computes with an estimator in a worker of the Python backend.

Read in this order:
`model` is the model.py. `estimator_file` loads the estimator, with the types of `trusted_types`.
`inputs` makes rows of requests, `outputs` makes tensors of what the estimator returns.
`contract` completes and checks the config, `batch` computes several requests at once.
"""

"""SavedModels and GraphDefs by TensorFlow, on CPUs.

Read in this order: `backend` loads a model, `parameters` reads its parameters, `model_file` reads
its file, `batching` finds whether it batches, `session` opens it, `instance` runs it; `library`
imports TensorFlow.
"""

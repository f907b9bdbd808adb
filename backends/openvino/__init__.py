"""Models of OpenVINO, ONNX, TensorFlow, TFLite and Paddle by OpenVINO.

Read in this order: `backend` loads a model, `parameters` reads its parameters, `model_file` reads
its file and fits it to its config, `instance` runs it. `whole_files` checks that a file is whole,
`library` imports the library.
"""

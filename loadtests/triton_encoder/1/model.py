"""An ONNX encoder for Triton's Python backend: every batch that Triton makes is one run.

Requests of a batch have one shape, because that is what Triton's batcher combines.
"""

import json
import sys

import numpy as np
import triton_python_backend_utils as pb_utils

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class TritonPythonModel:
    """Parameters: `model` the ONNX file, `packages` the folder with onnxruntime, `threads`."""

    def initialize(self, args):
        """Load the session."""
        config = json.loads(args["model_config"])
        parameters = config["parameters"]
        (self._output,) = [each["name"] for each in config["output"]]
        sys.path.append(parameters["packages"]["string_value"])
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(parameters["threads"]["string_value"])
        self._session = onnxruntime.InferenceSession(
            parameters["model"]["string_value"], options, providers=["CPUExecutionProvider"]
        )

    def execute(self, requests):
        """One run for all requests, whose rows are stacked."""
        inputs = {name: self._stack(requests, name) for name in INPUTS}
        (found,) = self._session.run([self._output], inputs)
        rows = [len(self._array(request, INPUTS[0])) for request in requests]
        parts = np.split(found, np.cumsum(rows)[:-1])
        return [
            pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(self._output, part)])
            for part in parts
        ]

    def _stack(self, requests, name):
        return np.concatenate([self._array(request, name) for request in requests])

    def _array(self, request, name):
        return pb_utils.get_input_tensor_by_name(request, name).as_numpy()

"""Counts up to n, one response each."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count(request)


def count(request):
    sender = request.get_response_sender()
    n = pb_utils.get_input_tensor_by_name(request, "n").as_numpy()[0]
    for i in range(n):
        tensor = pb_utils.Tensor("i", np.array([i], np.int32))
        sender.send(pb_utils.InferenceResponse([tensor]))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

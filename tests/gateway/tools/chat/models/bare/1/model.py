"""Answers with the number of messages and the parameters of the request."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [answer(request) for request in requests]


def answer(request):
    messages = json.loads(pb_utils.get_input_tensor_by_name(request, "messages").as_numpy()[0, 0])
    said = f"{len(messages)} messages, {request.parameters()}"
    tensor = pb_utils.Tensor("text_output", np.array([[said.encode()]], dtype=object))
    return pb_utils.InferenceResponse([tensor])

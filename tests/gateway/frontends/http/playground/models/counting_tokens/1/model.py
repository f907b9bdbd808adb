"""Answers as an engine does: it counts tokens and gives its finish reason on request."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils

PIECES = (("one ", 2, "None"), ("two ", 3, "None"), ("three", 4, "length"))
PAUSE_SECS = 0.5


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for text, tokens, reason in pieces(request):
                sender.send(pb_utils.InferenceResponse(outputs(request, text, tokens, reason)))
                time.sleep(PAUSE_SECS)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def pieces(request):
    """The pieces of its answer: the sampling parameters if the input asks for them."""
    said = pb_utils.get_input_tensor_by_name(request, "messages").as_numpy().ravel()[0]
    if b"sampling" not in said:
        return PIECES
    sampling = pb_utils.get_input_tensor_by_name(request, "sampling_parameters")
    return ((sampling.as_numpy().ravel()[0].decode(), 1, "stop"),)


def outputs(request, text, tokens, reason):
    found = [pb_utils.Tensor("text_output", texts(text))]
    if wanted(request, "return_num_output_tokens"):
        found.append(pb_utils.Tensor("num_output_tokens", np.array([tokens], np.uint32)))
    if wanted(request, "return_finish_reason"):
        found.append(pb_utils.Tensor("finish_reason", texts(reason)))
    return found


def wanted(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return tensor is not None and bool(tensor.as_numpy().ravel()[0])


def texts(text):
    return np.array([text.encode()], dtype=np.object_)

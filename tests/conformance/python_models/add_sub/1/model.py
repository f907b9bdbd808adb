"""Sums and differences; an error for what is negative."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [answer(request) for request in requests]


def answer(request):
    x = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
    y = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
    if x[0] < 0:
        error = pb_utils.TritonError("negative", pb_utils.TritonError.INVALID_ARG)
        return pb_utils.InferenceResponse(error=error)
    outputs = [pb_utils.Tensor("OUTPUT0", x + y), pb_utils.Tensor("OUTPUT1", x - y)]
    return pb_utils.InferenceResponse(outputs)

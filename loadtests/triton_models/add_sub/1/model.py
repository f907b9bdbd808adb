"""Sums and differences of 16 floats, for Triton's python backend."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT0 = INPUT0 + INPUT1 and OUTPUT1 = INPUT0 - INPUT1, for each request of the batch."""

    def execute(self, requests):
        """Answer the requests one by one, as Triton's own example does."""
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        first = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        second = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
        sums = pb_utils.Tensor("OUTPUT0", first + second)
        differences = pb_utils.Tensor("OUTPUT1", first - second)
        return pb_utils.InferenceResponse(output_tensors=[sums, differences])

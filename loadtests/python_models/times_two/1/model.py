"""Every number twice."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT0 = INPUT0 * 2, for each request of the batch."""

    def execute(self, requests):
        """Answer the requests one by one."""
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        found = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", found * 2)])

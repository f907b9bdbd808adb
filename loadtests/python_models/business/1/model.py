"""Business logic: one model's answer goes into another."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT0 = (INPUT0 + 1) * 2, by asking plus_one and then times_two."""

    def execute(self, requests):
        """Answer the requests one by one."""
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        found = pb_utils.get_input_tensor_by_name(request, "INPUT0")
        for model in ("plus_one", "times_two"):
            asked = pb_utils.InferenceRequest(
                model_name=model,
                requested_output_names=["OUTPUT0"],
                inputs=[pb_utils.Tensor("INPUT0", found.as_numpy())],
            )
            answer = asked.exec()
            if answer.has_error():
                return pb_utils.InferenceResponse(error=answer.error())
            found = pb_utils.get_output_tensor_by_name(answer, "OUTPUT0")
        output = pb_utils.Tensor("OUTPUT0", found.as_numpy())
        return pb_utils.InferenceResponse(output_tensors=[output])

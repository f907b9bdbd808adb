"""Answer a request n times, for Triton's python backend."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """n responses with `text_input` as `text_output`, `delay_us` microseconds apart."""

    def execute(self, requests):
        """Answer each request through its sender; the last response has the final flag."""
        for request in requests:
            self._repeat(request)

    def _repeat(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
        count, delay_us = self._scalar(request, "n"), self._scalar(request, "delay_us")
        sender = request.get_response_sender()
        if count == 0:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        for left in range(count - 1, -1, -1):
            if delay_us:
                time.sleep(delay_us / 1e6)
            output = pb_utils.Tensor("text_output", text)
            response = pb_utils.InferenceResponse(output_tensors=[output])
            flags = 0 if left else pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            sender.send(response, flags=flags)

    def _scalar(self, request, name):
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return 0 if tensor is None else int(np.asarray(tensor.as_numpy()).item())

"""Which embedding has a sentence? The mean over its tokens, of length 1."""

import numpy as np
import triton_python_backend_utils as pb_utils

SHORTEST = 1e-12
"""What sentence-transformers divides by where a mean is shorter."""


class TritonPythonModel:
    """`last_hidden_state` FP32 [batch, length, n] becomes `embedding` FP32 [batch, n]."""

    def execute(self, requests):
        """Answer each request by itself: their sentences have different lengths."""
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        hidden = pb_utils.get_input_tensor_by_name(request, "last_hidden_state").as_numpy()
        mask = pb_utils.get_input_tensor_by_name(request, "attention_mask").as_numpy()
        # The mean and the sum differ by a factor only, which the length takes out again.
        total = np.matmul(mask[:, None].astype(np.float32), hidden)[:, 0]
        length = np.linalg.norm(total, axis=1, keepdims=True)
        embedding = total / np.maximum(length, SHORTEST)
        return pb_utils.InferenceResponse([pb_utils.Tensor("embedding", embedding)])

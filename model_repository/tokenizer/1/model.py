"""Which tokens are a sentence? The tokenizer of all-MiniLM-L6-v2."""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer


class TritonPythonModel:
    """`text` BYTES [batch, 1] becomes ids, mask and types, INT64 [batch, length].

    `num_input_tokens` UINT32 [batch, 1] is how many tokens each sentence has.
    """

    def initialize(self, args):
        """Read tokenizer.json of the stored model, or on Triton of the folder that is named."""
        named = json.loads(args["model_config"])["parameters"]["stored_model"]["string_value"]
        folder = Path(args.get("stored_model", named))
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_padding()

    def execute(self, requests):
        """Answer each request by itself: its sentences are padded to its own longest."""
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
        try:
            found = self._tokenizer.encode_batch([text.decode() for text in texts.ravel()])
        except UnicodeDecodeError as error:
            refused = pb_utils.TritonError(
                f"input 'text' must be UTF-8: {error}", pb_utils.TritonError.INVALID_ARG
            )
            return pb_utils.InferenceResponse(error=refused)
        rows = {
            "input_ids": [each.ids for each in found],
            "attention_mask": [each.attention_mask for each in found],
            "token_type_ids": [each.type_ids for each in found],
        }
        tensors = [pb_utils.Tensor(name, np.array(row, np.int64)) for name, row in rows.items()]
        counts = [[sum(each.attention_mask)] for each in found]
        tensors.append(pb_utils.Tensor("num_input_tokens", np.array(counts, np.uint32)))
        return pb_utils.InferenceResponse(tensors)

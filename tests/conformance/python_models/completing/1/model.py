"""Has no config.pbtxt: says itself what it takes, and answers with its arguments."""

import json

import numpy as np
import sibling
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [2]})
        config.add_output({"name": "doubled", "data_type": "TYPE_FP32", "dims": [2]})
        config.add_output({"name": "told", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(4)
        config.set_dynamic_batching()
        return config

    def initialize(self, args):
        config = json.loads(args["model_config"])
        output = pb_utils.get_output_config_by_name(config, "doubled")
        self.dtype = pb_utils.triton_string_to_numpy(output["data_type"])
        self.told = {key: args[key] for key in sorted(args) if key.startswith("model_v")}
        self.told["max_batch_size"] = config["max_batch_size"]

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = request.inputs()[0].as_numpy()
        told = np.full((len(x), 1), json.dumps(self.told), dtype=np.object_)
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("doubled", sibling.doubled(x).astype(self.dtype)),
                pb_utils.Tensor("told", told),
            ]
        )

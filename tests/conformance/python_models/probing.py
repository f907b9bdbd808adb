"""Shared parts of the probes: they run the code that they are sent."""

import numpy as np
import triton_python_backend_utils as pb_utils


def text(*values):
    array = np.array(values, dtype=np.object_)
    return pb_utils.InferenceResponse([pb_utils.Tensor("text", array)])


def numbers(*values):
    array = np.array(values, dtype=np.float32)
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", array)])


def caught(call, *arguments, **named):
    try:
        return f"ok: {call(*arguments, **named)!r}"
    except BaseException as error:  # noqa: BLE001 - the test compares every error
        return f"{type(error).__name__}: {error}"


def add_sub(first, **named):
    tensors = [("INPUT0", first), ("INPUT1", [1, 1, 1, 1])]
    return pb_utils.InferenceRequest(
        model_name=named.pop("model_name", "add_sub"),
        requested_output_names=named.pop("outputs", ["OUTPUT0"]),
        inputs=[pb_utils.Tensor(name, np.array(value, np.float32)) for name, value in tensors],
        **named,
    )


def counting(number):
    n = pb_utils.Tensor("n", np.array([number], np.int32))
    return pb_utils.InferenceRequest(
        model_name="counting", requested_output_names=["i"], inputs=[n]
    )


def seen(response):
    if response.has_error():
        return response.error().message()
    return [(each.name(), each.as_numpy().tolist()) for each in response.output_tensors()]


def written(requests, keyword="def"):
    code = pb_utils.get_input_tensor_by_name(requests[0], "code").as_numpy().reshape(-1)[0].decode()
    lines = "\n".join("    " + line for line in code.splitlines())
    found = {}
    exec(f"{keyword} run(self, requests):\n{lines}", globals(), found)
    return found["run"]

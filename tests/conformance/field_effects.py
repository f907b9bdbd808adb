"""A server whose models a test writes one by one, to see the effect of a field of their configs."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.errors import InferenceError
from gateway.in_process.responses import Responses
from gateway.in_process.server import ModelHandle, Server
from tests.serving import wait_until, write_model

PROBE = """
import json
import os
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def listed(tensor):
    array = tensor.as_numpy()
    values = [each.decode() if isinstance(each, bytes) else each for each in array.flat]
    dtype = "bytes" if array.dtype == object else array.dtype.name
    return [dtype, list(array.shape), np.array(values).tolist()]


class TritonPythonModel:
    '''Answers what it is and was given: T as JSON, Y the input X, S_OUT one more than S_IN.

    While the file `gate` is missing it does not answer a request whose X is negative; with `later`
    it executes others meanwhile.
    '''

    def initialize(self, args):
        self.config = json.loads(args["model_config"])
        parameters = self.config.get("parameters", {})
        self.gate = parameters.get("gate", {}).get("string_value", "")
        self.rounds = int(parameters.get("rounds", {}).get("string_value", "1"))
        self.later = "later" in parameters
        self.args, self.order, self.warmed = args, 0, []

    def execute(self, requests):
        self.order += 1
        order = self.order
        inputs = [{each.name(): listed(each) for each in one.inputs()} for one in requests]
        held = [one["X"][2] for one in inputs if "X" in one and min(one["X"][2], default=0) < 0]
        if held and self.gate:
            open(f"{self.gate}-{self.args['model_name']}-{os.getpid()}-{order}", "w").close()
        if held and self.later:
            threading.Thread(target=self.send, args=(requests, inputs, order)).start()
            return [None] * len(requests)
        if held:
            self.wait()
        return [
            self.answer(request, found, order, len(requests))
            for request, found in zip(requests, inputs)
        ]

    def wait(self):
        while self.gate and not os.path.exists(self.gate):
            time.sleep(0.001)

    def send(self, requests, inputs, order):
        self.wait()
        for request, found in zip(requests, inputs):
            response = self.answer(request, found, order, len(requests))
            request.get_response_sender().send(response, FINAL)

    def answer(self, request, inputs, order, together):
        if order < self.rounds:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return None
        found = {key: self.args[f"model_instance_{key}"] for key in ("name", "kind", "device_id")}
        found |= {"inputs": inputs, "order": order, "together": together, "warmed": self.warmed}
        found["cores"] = sorted(os.sched_getaffinity(0))
        found |= {"version": self.args["model_version"], "config": self.config, "pid": os.getpid()}
        rows = max([one[1][0] for one in inputs.values() if one[1]], default=1)
        batching = self.config["max_batch_size"] > 0
        text = np.array([json.dumps(found)] * (rows if batching else 1), np.object_)
        self.warmed = [*self.warmed, inputs]
        outputs = [pb_utils.Tensor("T", text.reshape(-1, 1) if batching else text)]
        for one in request.inputs():
            if one.name() == "X":
                outputs.append(pb_utils.Tensor("Y", one.as_numpy()))
            if one.name() == "S_IN":
                outputs.append(pb_utils.Tensor("S_OUT", one.as_numpy() + 1))
        return pb_utils.InferenceResponse(outputs)
"""
X = 'input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }\n'
T = 'output { name: "T" data_type: TYPE_STRING dims: [ 1 ] }\n'
ON_CPU = "instance_group { kind: KIND_CPU }\n"
PYTHON = 'backend: "python"\n'
IDENTITY = (
    'backend: "identity" input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }\n'
    'output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }\n'
)
Files = Mapping[str, bytes]


class World:
    """One server, and a repository to which models are added; their names are their numbers."""

    def __init__(self, server: Server, repository: Path) -> None:
        self.server = server
        self.repository = repository
        self._number = 0
        self._loaded: list[str] = []

    def load(
        self, config: str, files: Files | None = None, versions: Sequence[int] = (1,)
    ) -> ModelHandle:
        """Add a model of that config and those files, and load it; Python models are probes."""
        name = self.name()
        write_model(self.repository, name, config, versions)
        if 'backend: "python"' in config:
            files = {**{f"{each}/model.py": PROBE.encode() for each in versions}, **(files or {})}
        for path, data in (files or {}).items():
            place = self.repository / name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        self._loaded.append(name)
        return self.server.load(name)

    def unload(self) -> None:
        """Unload every model, the newest first: an ensemble before its members."""
        while self._loaded:
            self.server.unload(self._loaded.pop())

    def name(self) -> str:
        """The name of the next model."""
        self._number += 1
        return f"m{self._number}"

    def probe(
        self, config: str = "", *, batch: int = 8, inputs: str = X, outputs: str = T
    ) -> ModelHandle:
        """Load a probe that batches, with more in its config."""
        group = "" if "instance_group" in config else ON_CPU
        size = f"max_batch_size: {batch}\n"
        return self.load(PYTHON + size + inputs + outputs + config + group)

    def refused(self, config: str, files: Files | None = None) -> str:
        """The reason why a model is not loaded."""
        with pytest.raises(InferenceError) as caught:
            self.load(config, files)
        return caught.value.message

    def gate(self) -> "Gate":
        """A gate for probes: `parameters` of their configs name it."""
        return Gate(self.repository.parent / f"gate{self._number}")


class Gate:
    """Holds the executions of probes whose X is negative until it is opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.config = f'parameters {{ key: "gate" value {{ string_value: "{path}" }} }}\n'

    def reached(self, count: int = 1) -> None:
        """Wait until `count` executions are held."""
        wait_until(lambda: self.count >= count, f"{count} executions are held")

    @property
    def count(self) -> int:
        """The number of executions that have been held."""
        return len(list(self._path.parent.glob(f"{self._path.name}-*")))

    def open(self) -> None:
        """Release all held executions."""
        self._path.touch()


def x(*values: float, rows: int = 1) -> dict[str, Any]:
    """The input X."""
    return {"X": np.array([values] * rows, np.float32)}


def ask(model: ModelHandle, inputs: Mapping[str, Any] | None = None, **fields: Any) -> Responses:
    """Send a request to a probe."""
    return model.infer(inputs=x(1) if inputs is None else inputs, **fields)


def told(responses: Responses) -> Any:
    """The answer of a probe: its T."""
    return json.loads(responses.only().outputs["T"].flat[0])


def error(call: Callable[[], Any]) -> str:
    """The message of the error that a request ends with."""
    with pytest.raises(InferenceError) as caught:
        call()
    return caught.value.message

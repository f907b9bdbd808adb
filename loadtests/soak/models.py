"""The models of the soak: their configs, and the programs of Python models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto


class Form(Enum):
    """The content of a request."""

    NUMBER = auto()
    TEXT = auto()
    CHAT = auto()
    OPENAI = auto()
    EMBEDDING = auto()


class Trouble(Enum):
    """The troubles of a model: `LIMITED` by its own config, `CALLED` by other models."""

    RELOADED = auto()
    KILLED = auto()
    LIMITED = auto()
    CALLED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model of the repository; only clients ask a model that is not CALLED.

    `responses` is the number of responses of a stream, and 0 for a model that is not decoupled.
    Clients of a model with `few` send few different numbers, so that a cache has answers.
    The file of a model with `onnx` is a network.
    """

    name: str
    config: str
    program: str = ""
    form: Form = Form.NUMBER
    shape: Sequence[int] = (1,)
    responses: int = 0
    sequences: bool = False
    few: bool = False
    onnx: bool = False
    troubles: frozenset[Trouble] = frozenset()


HEAD = """import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def given(request):
    return pb_utils.get_input_tensor_by_name(request, "x").as_numpy()


def response(y):
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])


class TritonPythonModel:
    def initialize(self, args):
        with open("/proc/self/comm", "w") as name:
            name.write(args["model_name"])
"""
ECHO = f"""{HEAD}
    def execute(self, requests):
        return [response(given(request)) for request in requests]
"""
SLOW_ECHO = f"""{HEAD}
    def execute(self, requests):
        time.sleep(0.0004)
        return [response(given(request)) for request in requests]
"""
SENDING = f"""{HEAD}
    def execute(self, requests):
        for request in requests:
            work = request.get_response_sender(), given(request), request
            threading.Thread(target=self.send, args=work).start()
"""
STREAM = f"""{SENDING}
    def send(self, sender, x, request):
        for _ in range(5):
            time.sleep(0.001)
            sender.send(response(x))
        sender.send(flags=FINAL)
"""
LARGE = f"""{SENDING}
    def send(self, sender, x, request):
        y = np.full(20000, x[0], np.float32)
        for _ in range(30):
            if request.is_cancelled():
                break
            sender.send(response(y))
        sender.send(flags=FINAL)
"""
TWICE = f"""{HEAD}
    def execute(self, requests):
        for request in requests:
            start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy()
            if start.any():
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            else:
                request.get_response_sender().send(response(given(request)), flags=FINAL)
"""
BUSINESS = f"""import asyncio

{HEAD}
    async def execute(self, requests):
        return list(await asyncio.gather(*map(self.answer, requests)))

    async def answer(self, request):
        x = given(request)
        asked = [
            pb_utils.InferenceRequest(
                model_name=name,
                requested_output_names=["y"],
                inputs=[pb_utils.Tensor("x", x.reshape(shape))],
            )
            for name, shape in (("dynamic", (1, 1)), ("py_direct", (1,)))
        ]
        for found in await asyncio.gather(*(each.async_exec() for each in asked)):
            if found.has_error():
                return pb_utils.InferenceResponse(error=found.error())
            x = pb_utils.get_output_tensor_by_name(found, "y").as_numpy().reshape(1)
        return response(x)
"""
EMBED = f"""{HEAD}
    def execute(self, requests):
        return [self.embed(request) for request in requests]

    def embed(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy().ravel()
        numbers = [float(text.split()[1]) for text in texts]
        found = np.array([[number, number] for number in numbers], np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("embedding", found)])
"""
TALK = f"""{HEAD}
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            messages = pb_utils.get_input_tensor_by_name(request, "messages").as_numpy()
            for word in json.loads(messages.ravel()[0])[-1]["content"].split():
                if request.is_cancelled():
                    break
                time.sleep(0.001)
                text = np.array([word.encode() + b' '], dtype=np.object_)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)]))
            sender.send(flags=FINAL)
"""
X = 'input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }\n'
IO = X + 'output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }\n'
ROWS = 'input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }\n'
LENGTHS = ROWS + ROWS.replace("input", "output").replace('"x"', '"y"')
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
BATCHES = "max_batch_size: 4\n"
BATCHED = (1, 1)
TWO = "instance_group { count: 2 kind: KIND_CPU }\n"
ONE = "instance_group { count: 1 kind: KIND_CPU }\n"
CONTROLS = """control_input { name: "START" control {
  kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
control_input { name: "READY" control {
  kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }
"""
IDLE = "max_sequence_idle_microseconds: 200000"
DIRECT = f"sequence_batching {{ {IDLE} direct {{ }} {CONTROLS} }}\n"
OLDEST = f"""sequence_batching {{ {IDLE} {CONTROLS}
  oldest {{ max_candidate_sequences: 3 preserve_ordering: true max_queue_delay_microseconds: 500 }}
}}
"""
ITERATIVE = f"""sequence_batching {{ iterative_sequence: true direct {{ }} {CONTROLS}
  max_sequence_idle_microseconds: 5000000 }}
"""
ORDERED = "dynamic_batching { preserve_ordering: true max_queue_delay_microseconds: 300 }\n"
PRIORITIES = """dynamic_batching {
  priority_levels: 3 default_priority_level: 2
  default_queue_policy { default_timeout_microseconds: 20000 timeout_action: REJECT
    allow_timeout_override: true max_queue_size: 20 }
}
"""
MESSAGES = """input { name: "messages" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }
"""
TEXT_IN = """input { name: "text" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "embedding" data_type: TYPE_FP32 dims: [ 2 ] }
"""
CONTRACT = """input { name: "openai_request" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "openai_endpoint" data_type: TYPE_STRING dims: [ 1 ] optional: true }
output { name: "openai_response" data_type: TYPE_STRING dims: [ 1 ] }
"""


def _parameters(**values: object) -> str:
    entry = "parameters {{ key: \"{}\" value {{ string_value: '{}' }} }}\n"
    return "".join(entry.format(key, value) for key, value in values.items())


def _identity(*parts: str, io: str = IO, **parameters: object) -> str:
    return 'backend: "identity"\n' + io + "".join(parts) + _parameters(**parameters)


def _python(*parts: str, io: str = IO, **parameters: object) -> str:
    return 'backend: "python"\n' + io + "".join(parts) + _parameters(**parameters)


def _openvino(*parts: str) -> str:
    file = 'default_model_filename: "model.onnx"\n'
    return f'backend: "openvino"\n{file}{BATCHES}dynamic_batching {{ }}\n' + "".join(parts)


def _limiter(resource: str, count: int) -> str:
    limits = f'resources {{ name: "{resource}" count: {count} }} priority: {count}'
    return f"instance_group {{ count: 3 kind: KIND_CPU rate_limiter {{ {limits} }} }}\n"


def _ensemble(*members: str) -> str:
    """The members in turn; each has its batch dimension."""
    steps = []
    for number, member in enumerate(members):
        source = f"y{number}" if number else "x"
        target = f"y{number + 1}" if number + 1 < len(members) else "y"
        steps.append(
            f'step {{ model_name: "{member}" model_version: -1 '
            f'input_map {{ key: "x" value: "{source}" }} '
            f'output_map {{ key: "y" value: "{target}" }} }}'
        )
    return f'platform: "ensemble"\n{IO}{BATCHES}ensemble_scheduling {{ {" ".join(steps)} }}\n'


CALLED = frozenset({Trouble.CALLED})
KILLED = frozenset({Trouble.KILLED})
RELOADED = frozenset({Trouble.RELOADED})
LIMITED = frozenset({Trouble.LIMITED})
TRIES = _parameters(restart_tries=1_000_000)
DELAY = _parameters(delay_us=1000)

MODELS: Sequence[Model] = (
    Model(name="direct", config=_identity(TWO, DELAY)),
    Model(name="woken", config=_identity(DELAY, residency="on_demand", keep_alive_secs=0)),
    Model(name="large", config=_identity(io=LENGTHS, concurrency=0)),
    Model(name="unbounded", config=_identity(DELAY, concurrency=0)),
    Model(
        name="dynamic",
        config=_identity(BATCHES, "dynamic_batching { }\n", DELAY),
        shape=BATCHED,
        troubles=CALLED,
    ),
    Model(
        name="ordered",
        config=_identity(BATCHES, ORDERED, TWO, DELAY),
        shape=BATCHED,
        troubles=CALLED,
    ),
    Model(
        name="priorities",
        config=_identity(BATCHES, PRIORITIES, DELAY),
        shape=BATCHED,
        troubles=LIMITED,
    ),
    Model(
        name="padded",
        config=_identity(
            BATCHES,
            "dynamic_batching { }\n",
            DELAY,
            io=LENGTHS,
            padded_inputs='{"x": 0}',
            batch_token_budget=64,
        ),
        shape=(1, 7),
    ),
    Model(
        name="seq_direct",
        config=_identity(BATCHES, DIRECT, DELAY),
        shape=BATCHED,
        sequences=True,
    ),
    Model(
        name="seq_oldest",
        config=_identity(BATCHES, OLDEST, DELAY),
        shape=BATCHED,
        sequences=True,
    ),
    Model(
        name="py_iterative",
        config=_python("max_batch_size: 2\n", DECOUPLED, ITERATIVE, ONE),
        program=TWICE,
        shape=BATCHED,
        responses=1,
    ),
    Model(name="limiter_one", config=_identity(_limiter("R", 2), DELAY)),
    Model(
        name="limiter_two",
        config=_identity(BATCHES, "dynamic_batching { }\n", _limiter("R", 1), DELAY),
        shape=BATCHED,
    ),
    Model(name="cached", config=_identity("response_cache { enable: true }\n", DELAY), few=True),
    Model(name="pipeline", config=_ensemble("dynamic", "ordered"), shape=BATCHED),
    Model(name="repeat", config='backend: "repeat"\n', form=Form.TEXT, responses=20),
    Model(name="onnx", config=BATCHES + "dynamic_batching { }\n", shape=BATCHED, onnx=True),
    Model(name="openvino", config=_openvino(TWO), shape=BATCHED, onnx=True),
    Model(name="py_direct", config=_python(ONE), program=ECHO, troubles=CALLED),
    Model(
        name="py_dynamic",
        config=_python(BATCHES, "dynamic_batching { }\n", ONE),
        program=SLOW_ECHO,
        shape=BATCHED,
        troubles=CALLED,
    ),
    Model(
        name="py_sequence",
        config=_python(BATCHES, OLDEST, ONE),
        program=ECHO,
        shape=BATCHED,
        sequences=True,
    ),
    Model(
        name="py_cached",
        config=_python("response_cache { enable: true }\n", ONE),
        program=ECHO,
        few=True,
    ),
    Model(
        name="py_pipeline", config=_ensemble("py_dynamic", "dynamic", "py_dynamic"), shape=BATCHED
    ),
    Model(name="business", config=_python(ONE), program=BUSINESS),
    Model(name="py_stream", config=_python(DECOUPLED, ONE), program=STREAM, responses=5),
    Model(
        name="py_large",
        config=_python(DECOUPLED, ONE, io=X + LENGTHS.removeprefix(ROWS)),
        program=LARGE,
        responses=30,
    ),
    Model(
        name="embed",
        config=_python(BATCHES, "dynamic_batching { }\n", ONE, io=TEXT_IN),
        program=EMBED,
        form=Form.EMBEDDING,
        troubles=CALLED,  # by the route, once for each text
    ),
    Model(
        name="talk",
        config=_python(DECOUPLED, ONE, io=MESSAGES),
        program=TALK,
        form=Form.CHAT,
        responses=3,
    ),
    Model(
        name="openai",
        config=_python(DECOUPLED, ONE, io=CONTRACT),
        form=Form.OPENAI,
        responses=1,
    ),
    Model(
        name="killed",
        config=_python(BATCHES, "dynamic_batching { }\n", TWO, TRIES),
        program=SLOW_ECHO,
        shape=BATCHED,
        troubles=KILLED,
    ),
    Model(
        name="killed_stream",
        config=_python(DECOUPLED, ONE, TRIES),
        program=STREAM,
        responses=5,
        troubles=KILLED,
    ),
    Model(
        name="reloaded",
        config=_identity(BATCHES, ORDERED, TWO, DELAY),
        shape=BATCHED,
        troubles=RELOADED,
    ),
    Model(
        name="openvino_reloaded", config=_openvino(), shape=BATCHED, onnx=True, troubles=RELOADED
    ),
    Model(
        name="py_reloaded",
        config=_python(ONE),
        program=ECHO,
        troubles=RELOADED,
    ),
    Model(
        name="reloaded_pair",
        config=_ensemble("reloaded", "ordered"),
        shape=BATCHED,
        troubles=RELOADED,
    ),
)
BY_NAME: Mapping[str, Model] = {model.name: model for model in MODELS}
FLAGS = (
    *("--model-control-mode=explicit", "--load-model=*", "--model-load-thread-count=8"),
    *("--rate-limit=execution_count", "--cache-config=local,size=1048576"),
    *("--exit-timeout-secs=5", "--resumable-grace-secs=5", "--send-timeout-secs=5"),
)

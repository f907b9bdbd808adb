"""The models of the soak: configs, requests, and their repository."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from loadtests.soak import programs


class Form(Enum):
    """What a request of a model carries."""

    NUMBER = auto()
    TEXT = auto()
    CHAT = auto()
    OPENAI = auto()
    EMBEDDING = auto()


class Trouble(Enum):
    """What the soak does to a model; `LIMITS` are of its own config, `CALLED` of the others."""

    RELOADED = auto()
    KILLED = auto()
    LIMITED = auto()
    CALLED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model of the repository; what is not CALLED is only asked by clients.

    `responses` is how many a stream has; 0 is a model that is not decoupled. `few` says that its
    clients ask with few different numbers, so that a cache has answers for them.
    """

    name: str
    config: str
    program: str = ""
    form: Form = Form.NUMBER
    shape: Sequence[int] = (1,)
    responses: int = 0
    sequences: bool = False
    few: bool = False
    troubles: frozenset[Trouble] = frozenset()

    @property
    def steady(self) -> bool:
        """Whether it serves all along, so that every refusal needs a reason."""
        return not self.troubles & {Trouble.RELOADED, Trouble.KILLED, Trouble.LIMITED}


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
        program=programs.TWICE,
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
    Model(name="onnx", config=BATCHES + "dynamic_batching { }\n", shape=BATCHED),
    Model(name="py_direct", config=_python(ONE), program=programs.ECHO, troubles=CALLED),
    Model(
        name="py_dynamic",
        config=_python(BATCHES, "dynamic_batching { }\n", ONE),
        program=programs.SLOW_ECHO,
        shape=BATCHED,
        troubles=CALLED,
    ),
    Model(
        name="py_sequence",
        config=_python(BATCHES, OLDEST, ONE),
        program=programs.ECHO,
        shape=BATCHED,
        sequences=True,
    ),
    Model(
        name="py_cached",
        config=_python("response_cache { enable: true }\n", ONE),
        program=programs.ECHO,
        few=True,
    ),
    Model(
        name="py_pipeline", config=_ensemble("py_dynamic", "dynamic", "py_dynamic"), shape=BATCHED
    ),
    Model(name="business", config=_python(ONE), program=programs.BUSINESS),
    Model(name="py_stream", config=_python(DECOUPLED, ONE), program=programs.STREAM, responses=5),
    Model(
        name="py_large",
        config=_python(DECOUPLED, ONE, io=X + LENGTHS.removeprefix(ROWS)),
        program=programs.LARGE,
        responses=30,
    ),
    Model(
        name="embed",
        config=_python(BATCHES, "dynamic_batching { }\n", ONE, io=TEXT_IN),
        program=programs.EMBED,
        form=Form.EMBEDDING,
        troubles=CALLED,  # by the route, once for each text
    ),
    Model(
        name="talk",
        config=_python(DECOUPLED, ONE, io=MESSAGES),
        program=programs.TALK,
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
        program=programs.SLOW_ECHO,
        shape=BATCHED,
        troubles=KILLED,
    ),
    Model(
        name="killed_stream",
        config=_python(DECOUPLED, ONE, TRIES),
        program=programs.STREAM,
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
        name="py_reloaded",
        config=_python(ONE),
        program=programs.ECHO,
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


OPENAI_PROGRAM = Path(__file__).parents[2] / "model_repository" / "openai_python" / "1" / "model.py"


def write_repository(folder: Path) -> None:
    """Write every model of the catalogue."""
    for model in MODELS:
        (folder / model.name / "1").mkdir(parents=True)
        config(folder, model).write_text(model.config)
        version = folder / model.name / "1"
        if model.program:
            (version / "model.py").write_text(model.program)
        elif model.form is Form.OPENAI:
            shutil.copy(OPENAI_PROGRAM, version / "model.py")
        elif model.name == "onnx":
            _write_onnx(version / "model.onnx")


def config(folder: Path, model: Model) -> Path:
    """Where the config of a model is."""
    return folder / model.name / "config.pbtxt"


def _write_onnx(path: Path) -> None:
    """A network that answers `x` as `y`."""
    import onnx
    from onnx import TensorProto, helper

    names = ("x", "y")
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 1]) for n in names)
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "graph", [x], [y])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)

"""The models that a sweep asks: each scheduler with each backend that makes a difference to it."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec
from pathlib import Path

from onnx import TensorProto

from backends.openvino_genai.worker.sluice_openvino_genai.compiling import tiny_gguf
from tests import onnx_models
from tests.serving import ROOT, write_model
from tests.sweep.programs import CALLING, ECHO, ITERATING, SENDING, SENDING_LATER


class Contract(Enum):
    """The tensors of a model."""

    TEXT = ("text_input", "TYPE_STRING", "1", "text_output")
    NUMBERS = ("x", "TYPE_INT32", "-1", "y")
    REPEAT = ("text_input", "TYPE_STRING", "", "text_output")
    MESSAGES = ("messages", "TYPE_STRING", "1", "text_output")
    OPENAI = ("openai_request", "TYPE_STRING", "1", "openai_response")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One model; `text` is its config less the tensors.

    `responses` are those of one request. `one_sequence`: the requests of a crowded scene are of one
    sequence. `endless`: no request is answered to its end. `repeats`: all requests are equal, so
    that the cache has the answer. `bytes` lengthens each text; an LLM is asked with
    `sampling`, if it `streams` with the input `stream`, and adds the text `made`. `needs` are
    other models. `options` are the server's. `at_replica`: the server is a router, and a replica
    hosts the model. `recorded`: its requests are recorded, and asked again meanwhile.
    """

    name: str
    text: str
    program: str = ""
    contract: Contract = Contract.TEXT
    responses: int = 1
    decoupled: bool = False
    sequence: bool = False
    conversation: bool = False
    one_sequence: bool = False
    endless: bool = False
    resumable: bool = False
    repeats: bool = False
    bytes: int = 0
    made: str = ""
    streams: bool = False
    sampling: Mapping[str, int] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    at_replica: bool = False
    recorded: bool = False
    options: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def batches(self) -> bool:
        """Whether tensors have a batch dimension."""
        return "max_batch_size" in self.text

    @property
    def has_worker(self) -> bool:
        """Whether a process runs it."""
        return any(f'backend: "{name}"' in self.text for name in ("python", "openvino_genai"))

    @property
    def is_stand_in(self) -> bool:
        """Whether its instances end on demand."""
        return 'backend: "stand_in"' in self.text

    def write(self, repository: Path) -> None:
        """Add it to a repository."""
        if self.contract is Contract.OPENAI:
            shutil.copytree(ROOT / "model_repository" / "openai_python", repository / self.name)
            with (repository / self.name / "config.pbtxt").open("a") as config:
                config.write(parameters(**RESTARTS))
            return
        write_model(repository, self.name, self._config())
        if 'backend: "openvino_genai"' in self.text:
            (repository / self.name / "1" / "model.gguf").write_bytes(tiny_gguf())
            (repository / self.name / "1" / "model.json").write_text('{"num_kv_blocks": 16}')
        if self.program:
            (repository / self.name / "1" / "model.py").write_text(self.program)
        if 'backend: "onnxruntime"' in self.text:
            kind = TensorProto.INT32 if self.contract is Contract.NUMBERS else TensorProto.STRING
            source, _, _, target = self.contract.value
            dims = ("batch", "size") if self.batches else (1,)
            made = onnx_models.model(
                [onnx_models.node("Identity", source, target)],
                [onnx_models.tensor(source, dims, kind)],
                [onnx_models.tensor(target, dims, kind)],
            )
            onnx_models.save(made, repository / self.name / "1")

    def _config(self) -> str:
        if self.contract is Contract.REPEAT or self.made:
            return self.text
        source, kind, dims, target = self.contract.value
        ragged = " allow_ragged_batch: true" if "ragged" in self.name else ""
        tensors = (
            f'input {{ name: "{source}" data_type: {kind} dims: [{dims}]{ragged} }}\n'
            f'output {{ name: "{target}" data_type: {kind} dims: [{dims}] }}\n'
        )
        decoupled = "model_transaction_policy { decoupled: true }\n" if self.decoupled else ""
        return self.text + tensors + decoupled


def parameters(**given: object) -> str:
    """Those of a config."""
    entry = "parameters {{ key: '{}' value {{ string_value: '{}' }} }}\n"
    return "".join(entry.format(key, value) for key, value in given.items())


RESTARTS = {"restart_tries": 100_000}
IDENTITY, ONNX = (f'backend: "{name}"\n' for name in ("identity", "onnxruntime"))
PYTHON, STAND_IN = (
    f'backend: "{name}"\n' + parameters(**RESTARTS) for name in ("python", "stand_in")
)
SLOW = IDENTITY + parameters(delay_us=300)
STUCK = IDENTITY + parameters(delay_us=600_000_000)
ONE, TWO = (f"instance_group {{ count: {count} kind: KIND_CPU }}\n" for count in (1, 2))
BATCH = "max_batch_size: 4\n"
DYNAMIC = BATCH + "dynamic_batching { }\n"
DELAYED = BATCH + "dynamic_batching { max_queue_delay_microseconds: 300 }\n"
ORDERED = BATCH + "dynamic_batching { preserve_ordering: true }\n" + TWO
PADDED = DYNAMIC + parameters(padded_inputs='{"x": 0}')
IDLE = "max_sequence_idle_microseconds: 60000000"
SLOTS = BATCH + f"sequence_batching {{ {IDLE} direct {{ }} }}\n"
OLDEST = BATCH + f"sequence_batching {{ {IDLE} oldest {{ max_candidate_sequences: 4 }} }}\n"
BRIEF = "max_sequence_idle_microseconds: 200000"
"""A sequence that lost a request is not ended by a client: it expires."""
BRIEF_SLOTS, BRIEF_OLDEST = (text.replace(IDLE, BRIEF) for text in (SLOTS, OLDEST))
ITERATIVE = f"""max_batch_size: 1
sequence_batching {{ iterative_sequence: true {IDLE} control_input [
  {{ name: "START" control {{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }} }},
  {{ name: "READY" control {{ kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] }} }}
] }}
"""
LIMITED = """instance_group {
  count: 2 kind: KIND_CPU rate_limiter { resources { name: "R" count: 1 } priority: 1 }
}
"""
LIMITING: Mapping[str, object] = {"rate_limit": "execution_count", "rate_limit_resource": "R:1"}
CACHED = "response_cache { enable: true }\n"
CACHING: Mapping[str, object] = {"cache_config": {"local": {"size": 1 << 20}}}


def _call(model: str, source: str, target: str) -> str:
    return (
        f'step {{ model_name: "{model}" model_version: -1\n'
        f'input_map {{ key: "text_input" value: "{source}" }}\n'
        f'output_map {{ key: "text_output" value: "{target}" }} }}\n'
    )


def _ensemble(*calls: str, limit: int = 0) -> str:
    bound = f"max_inflight_requests: {limit}\n" if limit else ""
    steps = "".join(calls)
    return f'platform: "ensemble"\n{BATCH}ensemble_scheduling {{ {bound}{steps} }}\n'


MANY = {"decoupled": True, "responses": 3}
ENDLESS = {"endless": True, "needs": ("direct_identity",)}
"""Another model is asked whether the server still answers."""
ONE_SEQUENCE = {"sequence": True, "one_sequence": True}

GENAI = Subject(
    name="openvino_genai",
    text='backend: "openvino_genai"\n' + parameters(**RESTARTS),
    made="\N{REPLACEMENT CHARACTER}" * 3,
    sampling={"temperature": 0, "max_tokens": 3},
    decoupled=True,
)
"""An engine of LLMs, with a model of zeros whose likeliest token is no text."""
SUBJECTS = (
    Subject(name="direct_python", text=PYTHON + ONE, program=ECHO),
    Subject(name="dynamic_python", text=PYTHON + DYNAMIC + ONE, program=ECHO),
    Subject(name="direct_identity", text=IDENTITY + ONE),
    Subject(name="direct_slow", text=SLOW + ONE),
    Subject(name="direct_onnx", text=ONNX + ONE),
    Subject(name="direct_python_large", text=PYTHON + ONE, program=ECHO, bytes=100_000),
    Subject(name="direct_python_sending", text=PYTHON + ONE, program=SENDING, **MANY),
    Subject(name="direct_python_threads", text=PYTHON + ONE, program=SENDING_LATER, **MANY),
    Subject(name="direct_repeat", text='backend: "repeat"\n', contract=Contract.REPEAT, **MANY),
    Subject(name="direct_stand_in", text=STAND_IN + ONE + parameters(responses=3), **MANY),
    Subject(name="dynamic_slow", text=SLOW + DYNAMIC + TWO),
    Subject(name="dynamic_onnx", text=ONNX + DYNAMIC + ONE),
    Subject(name="dynamic_stand_in", text=STAND_IN + DYNAMIC + ONE + parameters(concurrency=1)),
    Subject(name="delayed_python", text=PYTHON + DELAYED + ONE, program=ECHO),
    Subject(name="ordered_slow", text=SLOW + ORDERED),
    Subject(name="ordered_python", text=PYTHON + ORDERED, program=ECHO),
    Subject(name="padded_onnx", text=ONNX + PADDED + ONE, contract=Contract.NUMBERS),
    Subject(
        name="ragged_python", text=PYTHON + DYNAMIC + ONE, program=ECHO, contract=Contract.NUMBERS
    ),
    Subject(name="slots_slow", text=SLOW + SLOTS + ONE, sequence=True),
    Subject(name="slots_python", text=PYTHON + SLOTS + ONE, program=ECHO, sequence=True),
    Subject(name="oldest_slow", text=SLOW + OLDEST + ONE, sequence=True),
    Subject(name="oldest_python", text=PYTHON + OLDEST + ONE, program=ECHO, sequence=True),
    Subject(name="slots_sequence_slow", text=SLOW + BRIEF_SLOTS + ONE, **ONE_SEQUENCE),
    Subject(name="oldest_sequence_slow", text=SLOW + BRIEF_OLDEST + ONE, **ONE_SEQUENCE),
    Subject(
        name="slots_sequence_python", text=PYTHON + BRIEF_SLOTS + ONE, program=ECHO, **ONE_SEQUENCE
    ),
    Subject(
        name="oldest_sequence_python",
        text=PYTHON + BRIEF_OLDEST + ONE,
        program=ECHO,
        **ONE_SEQUENCE,
    ),
    Subject(name="iterative_python", text=PYTHON + ITERATIVE + ONE, program=ITERATING, **MANY),
    Subject(name="limited_slow", text=SLOW + LIMITED, options=LIMITING),
    Subject(name="limited_python", text=PYTHON + LIMITED, program=ECHO, options=LIMITING),
    Subject(
        name="ensemble_line",
        text=_ensemble(
            _call("dynamic_slow", "text_input", "middle"),
            _call("dynamic_python", "middle", "text_output"),
            limit=2,
        ),
        needs=("dynamic_slow", "dynamic_python"),
    ),
    Subject(
        name="ensemble_twice",
        text=_ensemble(
            _call("dynamic_python", "text_input", "middle"),
            _call("dynamic_python", "middle", "text_output"),
        ),
        needs=("dynamic_python",),
    ),
    Subject(
        name="logic_of_slow",
        text=PYTHON + ONE,
        program=CALLING % "direct_slow",
        needs=("direct_slow",),
    ),
    Subject(
        name="logic_of_python",
        text=PYTHON + ONE,
        program=CALLING % "direct_python",
        needs=("direct_python",),
    ),
    Subject(
        name="woken_slow", text=SLOW + ONE + parameters(residency="on_demand", keep_alive_secs=0)
    ),
    Subject(name="missed_slow", text=SLOW + CACHED + ONE, options=CACHING),
    Subject(name="missed_python", text=PYTHON + CACHED + ONE, program=ECHO, options=CACHING),
    Subject(name="hit_slow", text=SLOW + CACHED + ONE, options=CACHING, repeats=True),
    Subject(
        name="hit_python",
        text=PYTHON + CACHED + DYNAMIC,
        program=ECHO,
        options=CACHING,
        repeats=True,
    ),
    Subject(
        name="conversation",
        text=STAND_IN + ONE + parameters(responses=3),
        contract=Contract.MESSAGES,
        conversation=True,
        **MANY,
    ),
    Subject(
        name="conversation_turns",
        text=STAND_IN + ONE + parameters(responses=3),
        contract=Contract.MESSAGES,
        conversation=True,
        one_sequence=True,
        **MANY,
    ),
    Subject(
        name="resumable_stand_in",
        text=STAND_IN + ONE + parameters(responses=3),
        resumable=True,
        **MANY,
    ),
    Subject(name="resumable_python", text=PYTHON + ONE, program=SENDING, resumable=True, **MANY),
    Subject(name="recorded_slow", text=SLOW + DYNAMIC + TWO, recorded=True),
    Subject(name="recorded_python", text=PYTHON + ONE, program=SENDING, recorded=True, **MANY),
    Subject(name="endless_direct", text=STUCK + ONE, **ENDLESS),
    Subject(name="endless_dynamic", text=STUCK + DYNAMIC + ONE, **ENDLESS),
    Subject(name="endless_slots", text=STUCK + SLOTS + ONE, sequence=True, **ENDLESS),
    Subject(
        name="endless_stand_in",
        text=STAND_IN + ONE + parameters(responses=1_000_000_000),
        decoupled=True,
        **ENDLESS,
    ),
    Subject(name="replica_slow", text=SLOW + DYNAMIC + TWO, at_replica=True),
    Subject(
        name="replica_stand_in",
        text=STAND_IN + ONE + parameters(responses=3),
        at_replica=True,
        **MANY,
    ),
    Subject(name="endless_replica", text=STUCK + ONE, at_replica=True, **ENDLESS),
    *(() if find_spec("openvino_genai") is None else (GENAI,)),
    Subject(
        name="openai_python",
        text=PYTHON + ONE,
        contract=Contract.OPENAI,
        made=" ",
        decoupled=True,
    ),
)
BY_NAME = {subject.name: subject for subject in SUBJECTS}

"""The models that the servers of this folder serve: what each answers is in its name."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.chatting import CHATTING
from tests.serving import write_model

NUMERIC = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BF16"),
)
DATATYPES = (*NUMERIC, "BYTES")
NEVER_US = 600_000_000
"""A delay that no test waits for."""

REPEAT = 'backend: "repeat"\n'


def write_repository(repository: Path) -> None:
    """Write every model of the catalogue."""
    for datatype in DATATYPES:
        write_model(repository, f"echo_{datatype.lower()}", identity(datatype))
    for name, config in CATALOGUE.items():
        write_model(repository, name, config)
    write_model(repository, "versioned", identity("FP32") + EVERY_VERSION, versions=(1, 3))
    write_model(repository, "labelled", LABELLED)
    (repository / "labelled" / "labels.txt").write_text("zero\none\ntwo\n")


def identity(datatype: str, dims: str = "-1", **parameters: object) -> str:
    """An identity model with input INPUT and output OUTPUT."""
    kind = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
    return (
        'backend: "identity"\n'
        f'input {{ name: "INPUT" data_type: {kind} dims: [{dims}] }}\n'
        f'output {{ name: "OUTPUT" data_type: {kind} dims: [{dims}] }}\n'
    ) + with_parameters(parameters)


def scripted(*script: Mapping[str, Any], **parameters: object) -> str:
    """A decoupled model that follows a script of `tests/scripted.py`."""
    return (
        'backend: "scripted"\n'
        'input { name: "text_input" data_type: TYPE_STRING dims: [1] }\n'
        'output { name: "text_output" data_type: TYPE_STRING dims: [1] }\n'
    ) + with_parameters({"script": json.dumps(script), **parameters})


def with_parameters(parameters: Mapping[str, object]) -> str:
    """The part of a config that gives a model its parameters."""
    entry = "parameters {{ key: {} value {{ string_value: {} }} }}\n"
    return "".join(
        entry.format(json.dumps(key), json.dumps(str(value))) for key, value in parameters.items()
    )


HOLD = {"hold_file": "held"}
"""Parameters of a model of `identity` that `held` can hold."""

DECOUPLED = "model_transaction_policy { decoupled: true }\n"
EVERY_VERSION = "version_policy { all {} }\n"
PAIR = """backend: "identity"
input [
  { name: "A" data_type: TYPE_INT32 dims: [2] },
  { name: "B" data_type: TYPE_INT32 dims: [2] },
  { name: "C" data_type: TYPE_INT32 dims: [2] optional: true }
]
output [
  { name: "X" data_type: TYPE_INT32 dims: [2] },
  { name: "Y" data_type: TYPE_INT32 dims: [2] }
]
"""
LABELLED = """backend: "identity"
input { name: "INPUT" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUTPUT" data_type: TYPE_FP32 dims: [-1] label_filename: "labels.txt" }
"""
NESTED = """backend: "identity"
input [
  { name: "INPUT" data_type: TYPE_STRING dims: [1] },
  { name: "parameters" data_type: TYPE_STRING dims: [1] optional: true }
]
output { name: "OUTPUT" data_type: TYPE_STRING dims: [1] }
"""
CATALOGUE = {
    "repeat": REPEAT,
    "single": identity("BYTES", "1"),
    "pair": PAIR,
    "nested": NESTED,
    "batched": identity("FP32", "16") + "max_batch_size: 8\n",
    "batched_text": identity("BYTES", "1") + "max_batch_size: 8\n",
    "matrix": identity("FP32", "-1, -1"),
    "sixteen": identity("FP32", "16"),
    "three": identity("BYTES", "1", responses=3) + DECOUPLED,
    "failing": identity("BYTES", "1", fail="the model says no"),
    "failing_stream": identity("BYTES", "1", fail="the model says no") + DECOUPLED,
    "slow": identity("BYTES", "1", delay_us=400_000, concurrency=0),
    "holding": identity("BYTES", "1", concurrency=0, **HOLD),
    "slow_start": scripted({"pause": 2.0}, {"text": "late", "final": True}) + DECOUPLED,
    "late_error": scripted({"pause": 1.0}, {"error": "too late"}) + DECOUPLED,
    "second_error": scripted({"text": "one"}, {"error": "and then it broke"}) + DECOUPLED,
    "flagged": scripted({"text": "one"}, {"text": "two"}, {"final": True}) + DECOUPLED,
    "annotated": scripted(
        {"text": "a", "parameters": {"score": 0.5, "n": 2, "ok": True, "s": "x"}, "final": True}
    ),
    "told": scripted({"text": "told", "echo_parameters": True, "final": True}),
    "told_stream": scripted({"text": "told", "echo_parameters": True, "final": True}) + DECOUPLED,
    "classes": identity("FP32", "3") + "max_batch_size: 4\n",
    "twice": scripted({"text": "one"}, {"text": "two", "final": True}),
    "silent": scripted({"final": True}),
    "crashing": scripted({"raise": f"cannot open {Path(__file__)}"}),
    "crashing_stream": scripted({"text": "one"}, {"raise": f"cannot open {Path(__file__)}"})
    + DECOUPLED,
    "unavailable": scripted({"error": "come back later", "code": "UNAVAILABLE"}),
    "stuck": identity("BYTES", "1", delay_us=NEVER_US),
    "endless": identity("BYTES", "1", delay_us=NEVER_US, concurrency=0) + DECOUPLED,
    "taking_turns": identity("BYTES", "1", **HOLD),
    "chatting": CHATTING + with_parameters({"delay_us": 10_000}) + DECOUPLED,
    "chatting_once": CHATTING,
    "chatting_briefly": CHATTING
    + DECOUPLED
    + with_parameters({"conversation_max_turns": 2, "conversation_max": 3}),
    "chatting_now": CHATTING + DECOUPLED + with_parameters({"conversation_idle_secs": 2}),
    "two_at_once": REPEAT + with_parameters({"max_in_flight": 2}),
    "two_single": identity("BYTES", "1", delay_us=NEVER_US, max_in_flight=2),
}


def texts(count: int) -> Sequence[str]:
    """Different texts, `count` of them."""
    return [f"text {number}" for number in range(count)]

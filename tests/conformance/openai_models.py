"""The models that `test_openai.py` asks: the template of the repository, and scripted ones."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from tests.conformance.models import DECOUPLED, identity, with_parameters
from tests.serving import ROOT, write_model

CONTRACT = """
input { name: "openai_request" data_type: TYPE_STRING dims: 1 }
input { name: "openai_endpoint" data_type: TYPE_STRING dims: 1 optional: true }
output { name: "openai_response" data_type: TYPE_STRING dims: 1 }
"""
ENCODER = """backend: "python"
max_batch_size: 16
dynamic_batching { }
input { name: "text" data_type: TYPE_STRING dims: 1 }
output { name: "embedding" data_type: TYPE_FP32 dims: 3 }
output { name: "num_input_tokens" data_type: TYPE_INT32 dims: 1 }
instance_group { kind: KIND_CPU }
"""
ENCODER_PROGRAM = '''
"""A text of n characters and m words is (n, m, 0)."""
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy().ravel()
        words = [len(text.decode().split()) for text in texts]
        rows = [[len(text.decode()), count, 0] for text, count in zip(texts, words)]
        return pb_utils.InferenceResponse([
            pb_utils.Tensor("embedding", np.array(rows, np.float32)),
            pb_utils.Tensor("num_input_tokens", np.array([words], np.int32).T),
        ])
'''


def step(body: Any, event: str = "", **more: Any) -> Mapping[str, Any]:
    """A response with that JSON."""
    parameters = {"openai_event": event} if event else {}
    text = orjson.dumps(body).decode()
    return {"output": "openai_response", "text": text, "parameters": parameters, **more}


def piece(text: str | None = None, reason: str | None = None) -> Mapping[str, Any]:
    """A chunk of a chat completion."""
    delta = {} if text is None else {"content": text}
    return step(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "delta": delta, "finish_reason": reason}],
        }
    )


def contract(*script: Mapping[str, Any], **parameters: object) -> str:
    """A model with the contract that follows a script of `tests/scripted.py`."""
    script_json = orjson.dumps(script).decode()
    return (
        'backend: "scripted"\n'
        + CONTRACT
        + DECOUPLED
        + with_parameters({"script": script_json, **parameters})
    )


SCRIPTED = {
    "breaking": contract(piece("one"), {"error": "and then it broke"}),
    "crashing": contract({"raise": f"cannot open {Path(__file__)}"}),
    "busy": contract({"error": "come back later", "code": "UNAVAILABLE"}),
    "silent": contract({"final": True}),
    "endless": contract(piece("one"), {"pause": 600}),
    "late": contract({"pause": 0.6}, piece("late", "stop"), {"final": True}),
    "adapted": contract(
        step({"object": "chat.completion", "id": "x", "choices": []}),
        {"final": True},
        openai_names='["formal", "org/rude"]',
        max_model_len=77,
    ),
    "speaker": contract(
        step({"type": "response.created", "sequence_number": 0}, "response.created"),
        step(
            {"type": "response.output_text.delta", "delta": "hi", "sequence_number": 1},
            "response.output_text.delta",
        ),
        {"final": True},
    ),
    "broken_names": contract(openai_names="not JSON"),
    "plain": identity("BYTES", "1"),
}


def write_repository(repository: Path) -> None:
    """Write them all."""
    shutil.copytree(ROOT / "model_repository" / "openai_python", repository / "openai_python")
    for name, config in SCRIPTED.items():
        write_model(repository, name, config)
    write_model(repository, "encoder", ENCODER)
    (repository / "encoder" / "1" / "model.py").write_text(ENCODER_PROGRAM)

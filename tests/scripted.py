"""Backend `scripted`: does what the parameters of its config say, also what no model should do.

It is no part of the gateway: a server finds it as it finds any installed backend (see `installed`).
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.backend import Answer, Backend, Instance, ModelContext
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.tensor import text_tensor

ROOT = Path(__file__).parent.parent


class ScriptedInstance(Instance):
    """Answers every request with the steps of a script, each a JSON object with one of these.

    `text`: a response, in `output` if it names one, with `parameters` if it has any (or those of
    the request if it says `echo_parameters`), the last one if `final`; `pause`: seconds;
    `error`: a failure with its `code`; `raise`: an exception that no backend should let slip.
    """

    concurrency = None

    def __init__(self, script: Sequence[Mapping[str, Any]]) -> None:
        self._script = script

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        for index, request in enumerate(requests):
            for step in self._script:
                await asyncio.sleep(step.get("pause", 0))
                if "raise" in step:
                    raise RuntimeError(step["raise"])
                if "pause" not in step:
                    yield index, _answer(step, request)

    async def close(self) -> None:
        """Nothing is held."""


def _answer(step: Mapping[str, Any], request: InferRequest) -> InferResponse | InferenceError:
    if "error" in step:
        return InferenceError(Code[step.get("code", "INTERNAL")], step["error"])
    name = step.get("output", "text_output")
    outputs = (text_tensor(name, [step["text"]]),) if "text" in step else ()
    parameters = request.parameters if "echo_parameters" in step else step.get("parameters", {})
    return InferResponse(outputs=outputs, parameters=parameters, final=step.get("final", False))


class ScriptedBackend(Backend):
    """Reads `script` and `load_secs` from `parameters`; `load_raises` is an exception's text.

    A load takes as long as the version folder has the file of `serving.held`.
    """

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        return config

    async def load(self, context: ModelContext) -> Instance:
        await asyncio.sleep(float(context.config.parameter("load_secs", "0")))
        while (context.path / "held").exists():  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.01)
        if trouble := context.config.parameter("load_raises"):
            raise RuntimeError(trouble)
        return ScriptedInstance(json.loads(context.config.parameter("script", "[]")))


def installed(folder: Path) -> dict[str, str]:
    """Install this backend, `chatting` and `telling` into a folder.

    With the environment returned a server finds them there.
    """
    metadata = folder / "scripted-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted\nVersion: 1.0\n")
    points = (
        "[sluice.backends]\n"
        "scripted = tests.scripted:ScriptedBackend\n"
        "chatting = tests.chatting:ChattingBackend\n"
        "telling = tests.telling:TellingBackend\n"
    )
    (metadata / "entry_points.txt").write_text(points)
    return {"PYTHONPATH": f"{folder}:{ROOT}"}

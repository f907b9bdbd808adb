"""Ensembles of chained models, and their errors."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gateway.config import ModelConfig
from gateway.config.scheduling import EnsembleScheduling, EnsembleStep
from gateway.ensembles.backend import EnsembleInstance
from gateway.errors import Code, InferenceError
from gateway.models.model import Model
from gateway.stream import ResponseStream
from tests.builders import (
    TEXT,
    ScriptedInstance,
    read_all,
    soon,
    text_request,
)
from tests.conftest import Serve


def call(model: str, source: str, target: str) -> EnsembleStep:
    return EnsembleStep(
        model_name=model,
        model_version=-1,
        input_map={"text_input": source},
        output_map={"text_output": target},
    )


class Ensemble:
    """An ensemble of scripted models; `model` serves it, the members go by their names."""

    def __init__(
        self, serve: Serve, *steps: EnsembleStep, outputs: str = "text_output", **options: Any
    ) -> None:
        limit = options.pop("max_inflight_requests", 0)
        configs: Mapping[str, ModelConfig] = options.pop("configs", {})
        names = dict.fromkeys(step.model_name for step in steps)
        self.members = {name: ScriptedInstance() for name in names}
        self.models = {
            name: serve(self.members[name], config=replace(configs.get(name, TEXT), name=name))
            for name in names
        }
        config = replace(
            TEXT,
            name="e",
            output=tuple(replace(TEXT.output[0], name=name) for name in outputs.split()),
            ensemble_scheduling=EnsembleScheduling(step=steps, max_inflight_requests=limit),
            **options,
        )
        bound = {(name, -1): model for name, model in self.models.items()}
        self.instance = EnsembleInstance(config, bound)
        self.model: Model = serve(self.instance, config=config)

    def __getitem__(self, name: str) -> ScriptedInstance:
        return self.members[name]

    def ask(self, text: str = "x", **fields: Any) -> ResponseStream:
        return self.model.submit(text_request(text, model="e", **fields))


def chain(serve: Serve, **options: Any) -> Ensemble:
    """`a` and then `b`."""
    return Ensemble(serve, call("a", "text_input", "m"), call("b", "m", "text_output"), **options)


async def error_of(stream: ResponseStream) -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        await soon(read_all(stream))
    return caught.value.code, caught.value.message

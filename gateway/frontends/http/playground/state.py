"""State of the server, models and machine for the page at `/`."""

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from gateway import __version__
from gateway.config import ModelConfig
from gateway.dataplane import DataPlane
from gateway.generation import MESSAGES, TEXT_OUTPUT
from gateway.models.model import Model
from gateway.models.table import IndexRow
from gateway.observability.machine import Machine
from gateway.openai_contract import serves_openai
from gateway.settings import ControlMode, Settings

ENGINE = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_cache",
}
"""Gauges of engines with their own batching, and their names on the page."""
MACHINE = {
    "nv_cpu_utilization": "cpu",
    "nv_cpu_memory_used_bytes": "memory_used",
    "nv_cpu_memory_total_bytes": "memory_total",
}
GPU = {
    "nv_gpu_utilization": "use",
    "nv_gpu_memory_used_bytes": "memory_used",
    "nv_gpu_memory_total_bytes": "memory_total",
}


class ServerState:
    """Reads the state for each request, and nothing before.

    Counts and durations are totals since the model was loaded; the page computes differences.
    """

    def __init__(self, dataplane: DataPlane, settings: Settings) -> None:
        self._dataplane = dataplane
        self._settings = settings

    async def read(self) -> dict[str, Any]:
        """The server, each version of each model, and the machine, as members of JSON."""
        rows = await self._dataplane.index()
        machine = await self._dataplane.threads.run(self._machine_now)
        return {"server": self._server(), "models": self._models(rows), "machine": machine}

    def _server(self) -> dict[str, Any]:
        return {
            "name": self._settings.id,
            "version": __version__,
            "ready": self._dataplane.ready,
            "explicit": self._settings.models.control_mode is ControlMode.EXPLICIT,
        }

    def _models(self, rows: list[IndexRow]) -> list[dict[str, Any]]:
        loaded: defaultdict[tuple[str, str], list[Model]] = defaultdict(list)
        for model in self._dataplane.models():
            loaded[model.name, model.version].append(model)
        return [_row(row, loaded[row.name, row.version]) for row in rows]

    @cached_property
    def _machine(self) -> Machine:
        """Created for the first request: the drivers of GPUs are slow to start."""
        return Machine(self._settings.metrics)

    def _machine_now(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            MACHINE[each.name]: each.samples[0].value
            for each in self._machine.families()
            if each.name in MACHINE
        }
        return {**found, "gpus": self._gpus()}

    def _gpus(self) -> list[dict[str, Any]]:
        gpus: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for family in self._machine.gpus.families() if self._machine.gpus is not None else ():
            for sample in family.samples if family.name in GPU else ():
                gpus[sample.labels["gpu_uuid"]][GPU[family.name]] = sample.value
        return [{"id": uuid, **values} for uuid, values in gpus.items()]


def _row(row: IndexRow, loaded: list[Model]) -> dict[str, Any]:
    """One version, with statistics if it is loaded (with namespaces: those of the first left)."""
    shown: dict[str, Any] = {
        "name": row.name,
        "version": row.version,
        "state": row.state,
        "reason": row.reason,
    }
    return {**shown, **_loaded(loaded.pop(0))} if loaded else shown


def _loaded(model: Model) -> dict[str, Any]:
    config, found = model.config, model.statistics
    compute_ns = found.compute_input.ns + found.compute_infer.ns + found.compute_output.ns
    return {
        **_kind(config),
        "decoupled": config.decoupled,
        "in_flight": model.in_flight,
        "queued": found.pending,
        "succeeded": found.success.count,
        "failed": found.fail.count,
        "inferences": found.inference_count,
        "executions": found.execution_count,
        "request_ns": found.success.ns,
        "queue_ns": found.queue.ns,
        "compute_ns": compute_ns,
        "completion_tokens": found.completion_tokens,
        "first_tokens": sum(found.first_token.counts),
        "first_token_secs": found.first_token.total,
        "engine": dict(_engine(model)),
    }


def _kind(config: ModelConfig) -> dict[str, str]:
    """The page's form for a model: `chat` with the endpoint that takes messages, or `tensor`."""
    named = {each.name for each in config.input}
    if MESSAGES in named and any(each.name == TEXT_OUTPUT for each in config.output):
        return {"kind": "chat", "door": "generate"}
    if serves_openai(config):
        return {"kind": "chat", "door": "openai"}
    return {"kind": "tensor"}


def _engine(model: Model) -> Iterator[tuple[str, float]]:
    for instance in model.instances:
        for family in instance.metrics:
            if family.name in ENGINE and family.samples:
                yield ENGINE[family.name], max(sample.value for sample in family.samples)

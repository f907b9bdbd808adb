"""Routes of the playground: the page at `/`, its files, the server's state, and its models."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway import __version__
from gateway.config import ModelConfig
from gateway.dataplane import DataPlane
from gateway.frontends.http.errors import JSON
from gateway.frontends.http.request_scope import caller_in
from gateway.generation import MESSAGES, TEXT_OUTPUT
from gateway.models.index import IndexRow
from gateway.models.model import Model
from gateway.observability.machine import Machine
from gateway.openai_contract import serves_openai
from gateway.policy.caller import Caller, sees
from gateway.settings import ControlMode, Settings

ASSETS = Path(__file__).parent / "assets"
PAGE = "index.html"
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Cached but revalidated, so that a new release takes effect at once.
    "Cache-Control": "no-cache",
}
"""Headers of all files: no framing, no other origins, no inline scripts or styles."""


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


@dataclass(frozen=True, slots=True)
class Asset:
    """One file; its `etag` is a hash of the content."""

    content: bytes
    media_type: str
    etag: str

    def response(self, request: Request) -> Response:
        """The file, or 304 for a browser that has it."""
        headers = {**HEADERS, "ETag": self.etag}
        if _names(request.headers.get("if-none-match", ""), self.etag):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def read_assets() -> dict[str, Asset]:
    """The files of the page, by name."""
    return {each.name: _asset(each.name, each.read_bytes()) for each in ASSETS.iterdir()}


def _asset(name: str, content: bytes) -> Asset:
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return Asset(content, MEDIA_TYPES[name.rpartition(".")[2]], etag)


def _names(given: str, etag: str) -> bool:
    """Whether a list of entity tags contains this one (RFC 9110, 13.1.2)."""
    return any(each.strip().removeprefix("W/") in (etag, "*") for each in given.split(","))


class PlaygroundRoutes:
    """`GET /`, `/playground/state`, `/playground/models` and `/playground/{file}`.

    For all other actions the page sends the same requests as any client. A key that may not observe
    the server may list its models, as by `/v1/models`.
    """

    def __init__(self, dataplane: DataPlane, settings: Settings) -> None:
        self._state = ServerState(dataplane, settings)
        self._assets = read_assets()

    def routes(self) -> list[Route]:
        """Starlette routes, not shown at /docs."""
        return [
            Route("/", self.page, methods=["GET"]),
            Route("/playground/state", self.state, methods=["GET"]),
            Route("/playground/models", self.models, methods=["GET"]),
            Route("/playground/{name}", self.asset, methods=["GET"]),
        ]

    async def page(self, request: Request) -> Response:
        """The page."""
        return self._assets[PAGE].response(request)

    async def asset(self, request: Request) -> Response:
        """A style, script or icon of the page; 404 for other names."""
        asset = self._assets.get(request.path_params["name"])
        if asset is None:
            raise HTTPException(404)
        return asset.response(request)

    async def state(self, request: Request) -> Response:
        """The state of the server, not to be cached."""
        return _current(await self._state.read(), request)

    async def models(self, request: Request) -> Response:
        """The models that are ready, without statistics, not to be cached."""
        return _current(self._state.ready_models(caller_in(request.scope)), request)


def _current(found: dict[str, Any], request: Request) -> Response:
    """Members of JSON, and the `roles` of the caller's key: null on a server without keys."""
    caller = caller_in(request.scope)
    roles = None if caller is None else sorted(caller.roles)
    headers = {"Cache-Control": "no-store"}
    return Response(orjson.dumps({**found, "roles": roles}), headers=headers, media_type=JSON)


class ServerState:
    """Reads the state for each request, and nothing before.

    Counts and durations are totals since the model was loaded; the page computes differences.
    """

    def __init__(self, dataplane: DataPlane, settings: Settings) -> None:
        self._dataplane = dataplane
        self._settings = settings

    async def read(self) -> dict[str, Any]:
        """The server, each version of each model, machine, fleet, rollouts, as members of JSON."""
        rows = await self._dataplane.index()
        machine = await self._dataplane.threads.run(self._machine_now)
        fleet = self._dataplane.fleet
        return {
            "server": self._server(),
            "models": self._models(rows),
            "machine": machine,
            "fleet": None if fleet is None else fleet.describe(),
            "rollouts": self._dataplane.rollouts.describe_all(),
        }

    def ready_models(self, caller: Caller | None) -> dict[str, Any]:
        """The server, and each version that is ready for a caller, as members of JSON."""
        known = (each for each in self._dataplane.models() if sees(caller, each.name))
        ready = [each for each in known if each.ready]
        rows = [
            {**_shown(IndexRow(each.name, each.version, "READY")), **_form(each.config)}
            for each in ready
        ]
        return {"server": self._server(), "models": rows}

    def _server(self) -> dict[str, Any]:
        return {
            "name": self._settings.id,
            "version": __version__,
            "ready": self._dataplane.ready,
            "explicit": self._may_load,
        }

    @property
    def _may_load(self) -> bool:
        """Whether requests at this port load and unload models."""
        is_explicit = self._settings.models.control_mode is ControlMode.EXPLICIT
        return is_explicit and self._settings.http.changes

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
    return {**_shown(row), **_loaded(loaded.pop(0))} if loaded else _shown(row)


def _shown(row: IndexRow) -> dict[str, Any]:
    return {"name": row.name, "version": row.version, "state": row.state, "reason": row.reason}


def _loaded(model: Model) -> dict[str, Any]:
    config, found = model.config, model.statistics
    compute_ns = found.compute_input.ns + found.compute_infer.ns + found.compute_output.ns
    return {
        **_form(config),
        "in_flight": len(model.requests),
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


def _form(config: ModelConfig) -> dict[str, Any]:
    """The parts of a config that the page's form depends on, and the metadata of a model lacks."""
    return {
        **_kind(config),
        "decoupled": config.decoupled,
        "batched": config.max_batch_size > 0,
        "optional": [each.name for each in config.input if each.optional],
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

"""The table of access: the area of each route and method, and those that change the server.

A route is looked up when the application is built, so that the path of a request decides nothing.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum


class Area(StrEnum):
    """A part of the API; the first nine are Triton's (`restricted_features.h`)."""

    HEALTH = "health"
    METADATA = "metadata"
    INFERENCE = "inference"
    SHARED_MEMORY = "shared-memory"
    MODEL_CONFIG = "model-config"
    MODEL_REPOSITORY = "model-repository"
    STATISTICS = "statistics"
    TRACE = "trace"
    LOGGING = "logging"
    PLAYGROUND = "playground"
    METRICS = "metrics"
    ADMIN = "admin"


RESTRICTABLE = tuple(Area)[:9]
"""The areas that Triton's options name."""

_MODEL = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
_V1 = ("/v1", "/openai/v1")
_REGIONS = ("/v2/systemsharedmemory", "/v2/cudasharedmemory")
_LABELS = "/v2/repository/models/{model}/labels"
_RECORD = tuple(f"{each}/record" for each in _MODEL)
_ROLLOUT = "/v2/models/{model}/rollout"
_ROLLOUT_CHANGES = (
    *(f"{_ROLLOUT}/start", f"{_ROLLOUT}/pause", f"{_ROLLOUT}/resume"),
    *(f"{_ROLLOUT}/promote", f"{_ROLLOUT}/abort", f"{_ROLLOUT}/weight"),
)
_REPOSITORIES = ("/v2/repository", "/v2/repository/{repository}")


def _under(prefixes: Sequence[str], *rest: str) -> Sequence[str]:
    return [prefix + each for prefix in prefixes for each in rest]


HTTP: Mapping[Area, Sequence[str]] = {
    Area.HEALTH: (
        *("/v2/health/live", "/v2/health/ready", "/health", "/ping", "/load"),
        *_under(_MODEL, "/ready"),
    ),
    Area.METADATA: (
        *("/v2", "/version", *_MODEL, *_under(_V1, "/models", "/models/{model:path}")),
        *("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"),
        *("/static-offline-docs/{path:path}", "/playground/models"),
    ),
    Area.INFERENCE: (
        *_under(_MODEL, "/infer", "/generate", "/generate_stream"),
        *_under(_MODEL, "/requests/{request_id:path}/cancel"),
        *_under(_V1, "/chat/completions", "/completions", "/responses", "/embeddings"),
        *_under(("", *_V1), "/score", "/rerank"),
        *("/tokenize", "/detokenize"),
    ),
    Area.SHARED_MEMORY: _under(
        _under(_REGIONS, "", "/region/{region}"), "/status", "/register", "/unregister"
    ),
    Area.MODEL_CONFIG: _under(_MODEL, "/config"),
    Area.MODEL_REPOSITORY: (
        *_under(_REPOSITORIES, "/index", "/models/{model}/load", "/models/{model}/unload"),
        *(_LABELS, *_RECORD, *_ROLLOUT_CHANGES),
        *("/v2/rollouts", "/v2/rollouts/events", _ROLLOUT, f"{_ROLLOUT}/history"),
    ),
    Area.STATISTICS: (
        *("/v2/models/stats", *_under(_MODEL, "/stats")),
        *("/playground/state", "/v2/fleet", "/v2/memory"),
    ),
    Area.TRACE: ("/v2/trace/setting", "/v2/models/{model}/trace/setting"),
    Area.LOGGING: ("/v2/logging",),
    Area.PLAYGROUND: ("/", "/playground/{name}"),
    Area.METRICS: ("/metrics", "/metrics/", "/{path:path}"),
    Area.ADMIN: ("/admin/tenants", "/admin/why/{request_id:path}"),
}
"""The paths of the routes of each area, as the applications spell them.

Those of the metrics are on a port of their own.
"""

CHANGING = "POST"
HTTP_CHANGES: Mapping[Area, Sequence[str]] = {
    Area.SHARED_MEMORY: _under(
        _under(_REGIONS, "", "/region/{region}"), "/register", "/unregister"
    ),
    Area.MODEL_REPOSITORY: (
        *_under(_REPOSITORIES, "/models/{model}/load", "/models/{model}/unload"),
        *(_LABELS, *_RECORD, *_ROLLOUT_CHANGES),
    ),
    Area.TRACE: HTTP[Area.TRACE],
    Area.LOGGING: HTTP[Area.LOGGING],
}
"""The paths whose CHANGING method changes the server; all other routes read."""

_SERVICE = "/inference.GRPCInferenceService"
_ROLLOUTS = "/sluice.RolloutService"
_REFLECTION = "/grpc.reflection"

GRPC: Mapping[Area, Sequence[str]] = {
    Area.HEALTH: (
        *_under((_SERVICE,), "/ServerLive", "/ServerReady", "/ModelReady"),
        *_under(("/grpc.health.v1.Health",), "/Check", "/Watch"),
    ),
    Area.METADATA: (
        *_under((_SERVICE,), "/ServerMetadata", "/ModelMetadata"),
        *_under((_REFLECTION,), ".v1.ServerReflection/ServerReflectionInfo"),
        *_under((_REFLECTION,), ".v1alpha.ServerReflection/ServerReflectionInfo"),
    ),
    Area.INFERENCE: _under((_SERVICE,), "/ModelInfer", "/ModelStreamInfer"),
    Area.SHARED_MEMORY: _under(
        (f"{_SERVICE}/SystemSharedMemory", f"{_SERVICE}/CudaSharedMemory"),
        *("Status", "Register", "Unregister"),
    ),
    Area.MODEL_CONFIG: (f"{_SERVICE}/ModelConfig",),
    Area.MODEL_REPOSITORY: (
        *_under((_SERVICE,), "/RepositoryIndex", "/RepositoryModelLoad", "/RepositoryModelUnload"),
        *_under((_ROLLOUTS,), "/List", "/Get", "/Change", "/Watch"),
    ),
    Area.STATISTICS: (f"{_SERVICE}/ModelStatistics",),
    Area.TRACE: (f"{_SERVICE}/TraceSetting",),
    Area.LOGGING: (f"{_SERVICE}/LogSettings",),
}
"""The paths of the methods of each area."""

GRPC_CHANGES: Mapping[Area, Sequence[str]] = {
    Area.SHARED_MEMORY: _under(
        (f"{_SERVICE}/SystemSharedMemory", f"{_SERVICE}/CudaSharedMemory"),
        *("Register", "Unregister"),
    ),
    Area.MODEL_REPOSITORY: (
        *_under((_SERVICE,), "/RepositoryModelLoad", "/RepositoryModelUnload"),
        f"{_ROLLOUTS}/Change",
    ),
}
"""The methods that change the server."""
GRPC_SETTINGS: Mapping[Area, Sequence[str]] = {
    Area.TRACE: GRPC[Area.TRACE],
    Area.LOGGING: GRPC[Area.LOGGING],
}
"""The methods that change the server if their message has settings; all other methods read."""


def _by_path(table: Mapping[Area, Sequence[str]]) -> Mapping[str, Area]:
    return {path: area for area, paths in table.items() for path in paths}


AREA_OF_ROUTE: Mapping[str, Area] = _by_path(HTTP)
"""The area of each HTTP route."""
AREA_OF_METHOD: Mapping[str, Area] = _by_path(GRPC)
"""The area of each gRPC method."""
AREA_OF_ROUTE_CHANGE: Mapping[str, Area] = _by_path(HTTP_CHANGES)
"""The area of each path in HTTP_CHANGES."""
AREA_OF_METHOD_CHANGE: Mapping[str, Area] = _by_path(GRPC_CHANGES)
"""The area of each method in GRPC_CHANGES."""
AREA_OF_SETTINGS: Mapping[str, Area] = _by_path(GRPC_SETTINGS)
"""The area of each method in GRPC_SETTINGS."""


def area_at(path: str, areas: Mapping[str, Area], what: str) -> Area:
    """The area of the path of a route or a method; LookupError for one without an area."""
    area = areas.get(path)
    if area is None:
        raise LookupError(f"the {what} '{path}' has no area in gateway/policy/areas.py")
    return area

"""How this process is to run: one frozen dataclass per part, filled from flags by the CLI."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ENVIRONMENT: Mapping[str, str] = os.environ
"""The process's environment; read here and nowhere else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """The HTTP frontend. Port 0 picks a free one; sizes are bytes, times seconds."""

    enabled: bool = True
    address: str = "0.0.0.0"
    port: int = 8000
    max_input_size: int = 64 * 1024 * 1024
    first_response_secs: float = 5.0
    keep_alive_secs: float = 15.0
    send_timeout_secs: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcSettings:
    """The gRPC frontend; port 0 picks a free one."""

    enabled: bool = True
    address: str = "0.0.0.0"
    port: int = 8001
    send_timeout_secs: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSettings:
    """The metrics endpoint; port 0 picks a free one."""

    enabled: bool = True
    address: str = "0.0.0.0"
    port: int = 8002


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Which models are loaded, and what a failure means."""

    repositories: tuple[Path, ...] = ()
    store: Path = Path()
    config_name: str = ""
    exit_on_error: bool = True
    strict_readiness: bool = True
    load_thread_count: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a server is told from outside."""

    id: str = "triton"
    exit_timeout_secs: float = 30.0
    models: ModelSettings = field(default_factory=ModelSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    grpc: GrpcSettings = field(default_factory=GrpcSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)

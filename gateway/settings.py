"""How this process is to run: one frozen dataclass per part, filled from flags by the CLI."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

ENVIRONMENT: Mapping[str, str] = os.environ
"""The process's environment; read here and nowhere else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpTimeLimits:
    """Seconds that an HTTP client may take to send; 0 is no limit.

    `head_secs` is for a request line with its headers, `body_idle_secs` for the next bytes of a
    body, `connection_idle_secs` for the first byte of a request.
    """

    head_secs: float = 10.0
    body_idle_secs: float = 60.0
    connection_idle_secs: float = 75.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """The HTTP frontend. Port 0 picks a free one; sizes are bytes, times seconds.

    `header_forward_pattern` is a regular expression, "" for none. `playground` is the page at `/`.
    """

    enabled: bool = True
    playground: bool = True
    address: str = "0.0.0.0"
    port: int = 8000
    max_input_size: int = 64 * 1024 * 1024
    header_forward_pattern: str = ""
    first_response_secs: float = 5.0
    keep_alive_secs: float = 15.0
    send_timeout_secs: float = 30.0
    limits: HttpTimeLimits = field(default_factory=HttpTimeLimits)


UNIX = "unix:"
"""Before the path in the address of a Unix socket, as gRPC writes it."""


def netloc(address: str, port: int) -> str:
    """Where a listener is, as in a URL; of a Unix socket its address, which has no port."""
    if address.startswith(UNIX):
        return address
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


class GrpcTransport(StrEnum):
    """Whose HTTP/2 carries gRPC: hyper's (httpunk), or that of grpcio."""

    HYPER = "hyper"
    GRPCIO = "grpcio"


class CompressionLevel(StrEnum):
    """How much answers are compressed: the higher, the smaller and slower."""

    NONE = "none"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcTlsSettings:
    """Paths of PEM files.

    If it is `mutual`, clients must show a certificate of an authority in `root`, which else may
    be "".
    """

    cert: str
    key: str
    root: str = ""
    mutual: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcKeepaliveSettings:
    """How long a connection lasts, and who may ping whom, by gRPC's rules.

    A client is pinged after `time_ms` of silence, NEVER_MS for not at all. Of the two numbers of
    pings 0 is any number, an age of 0 is any age.
    """

    time_ms: int = 7_200_000
    timeout_ms: int = 20_000
    permit_without_calls: bool = False
    max_pings_without_data: int = 2
    min_recv_ping_interval_ms: int = 300_000
    max_ping_strikes: int = 2
    max_connection_age_ms: int = 0
    max_connection_age_grace_ms: int = 0


NEVER_MS = 2**31 - 1
"""What gRPC takes for a time that does not come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcSettings:
    """The gRPC frontend; port 0 picks a free one.

    `address` may also be `unix:` and the path of a socket, which needs no port.
    `header_forward_pattern` is a regular expression, "" for none.
    """

    enabled: bool = True
    transport: GrpcTransport = GrpcTransport.HYPER
    address: str = "0.0.0.0"
    port: int = 8001
    reuse_port: bool = False
    send_timeout_secs: float = 30.0
    header_forward_pattern: str = ""
    compression: CompressionLevel = CompressionLevel.NONE
    tls: GrpcTlsSettings | None = None
    keepalive: GrpcKeepaliveSettings = field(default_factory=GrpcKeepaliveSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSettings:
    """The metrics endpoint; port 0 picks a free one.

    `cpu` and `gpu` show those of the machine, read no more often than every `interval_ms`. The
    `latencies` choose the families of that kind; summaries show the `summary_quantiles`.
    """

    enabled: bool = True
    address: str = "0.0.0.0"
    port: int = 8002
    cpu: bool = True
    gpu: bool = True
    interval_ms: int = 2000
    counter_latencies: bool = True
    histogram_latencies: bool = False
    summary_latencies: bool = False
    summary_quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)


class LogFormat(StrEnum):
    """How a log line begins."""

    DEFAULT = "default"
    ISO8601 = "ISO8601"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """Where log lines go ("" is the console), which are written, and how they look.

    `escape` writes each message as a JSON string.
    """

    file: str = ""
    info: bool = True
    warning: bool = True
    error: bool = True
    verbose_level: int = 0
    format: LogFormat = LogFormat.DEFAULT
    escape: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """Which requests are traced, and where traces are written.

    `levels` are TIMESTAMPS, TENSORS, both, or none: no traces. Every `rate`th request is traced,
    until `count` have been (-1: without end). With a `log_frequency` that many traces make one
    file, `file`.0, `file`.1 and so on; with 0 all of them make one.
    """

    file: str = ""
    levels: tuple[str, ...] = ()
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0


class ControlMode(StrEnum):
    """Who decides what is loaded after the start: nobody, the folders, or load requests."""

    NONE = "none"
    POLL = "poll"
    EXPLICIT = "explicit"


EVERY_MODEL = "*"


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """How much there is of a resource of the rate limiter: on one device, or on each (None)."""

    name: str
    count: int
    device: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSettings:
    """Which GPUs models may have: those of that compute capability or better.

    The default is that of Triton's builds. Of a GPU with a limit, a fraction of its memory, no more
    may be taken when an instance loads.
    """

    min_compute_capability: tuple[int, int] = (6, 0)
    memory_limits: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Which models are loaded, and what a failure means.

    `startup` are the models to load first under explicit control, EVERY_MODEL alone meaning all.
    `backends` are the settings of each backend, those under "" hold for every one; the folders in
    `backend_directory` are backends written in Python. `summaries`
    has each model keep summaries of its latencies. `rate_limit` lets executions have the resources
    that instance groups ask for: as much as the `resource_limits` say, if there are any. An
    instance that makes no progress for `stall_secs` is restarted; 0 is never. `host_policies` are
    the CPU cores of each policy that an instance group can name.
    """

    repositories: tuple[Path, ...] = ()
    store: Path = Path()
    config_name: str = ""
    exit_on_error: bool = True
    strict_readiness: bool = True
    load_thread_count: int = 4
    load_retry_count: int = 0
    control_mode: ControlMode = ControlMode.NONE
    poll_secs: float = 15.0
    startup: tuple[str, ...] = ()
    auto_complete: bool = True
    namespacing: bool = False
    backends: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    backend_directory: Path | None = None
    summaries: bool = False
    rate_limit: bool = False
    resource_limits: tuple[ResourceLimit, ...] = ()
    gpus: GpuSettings = field(default_factory=GpuSettings)
    stall_secs: float = 0.0
    host_policies: Mapping[str, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCacheSettings:
    """A response cache in this process, and the bytes it may take."""

    byte_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisCacheSettings:
    """A response cache in a Redis server; a timeout of 0 waits forever.

    Of `tls` the paths may be "": then nothing is shown to the server, and the system's authorities
    are trusted.
    """

    host: str
    port: int
    user: str = ""
    password: str = field(default="", repr=False)
    db: int = 0
    connect_timeout_ms: int = 1000
    socket_timeout_ms: int = 100
    tls: bool = False
    cert: str = ""
    key: str = ""
    cacert: str = ""
    cacert_dir: str = ""


CacheSettings = LocalCacheSettings | RedisCacheSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumptionSettings:
    """Streams that a client can come back to.

    Each waits for its client for the grace period, and keeps `buffer_size` bytes at most; all of
    them take no more than `total_size`.
    """

    grace_secs: float = 30.0
    buffer_size: int = 1024 * 1024
    total_size: int = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a server is told from outside.

    So many `frontends` are processes of their own that have the connections, 0 for none. For so
    many microseconds at most the event loop stays awake for the next request (`busy_poll.py`).
    """

    id: str = "triton"
    frontends: int = 0
    stay_awake_us: int = 300
    exit_timeout_secs: float = 30.0
    allow_client_shm: bool = False
    cache: CacheSettings | None = None
    models: ModelSettings = field(default_factory=ModelSettings)
    resumption: ResumptionSettings = field(default_factory=ResumptionSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    grpc: GrpcSettings = field(default_factory=GrpcSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    log: LogSettings = field(default_factory=LogSettings)
    trace: TraceSettings = field(default_factory=TraceSettings)

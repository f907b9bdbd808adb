"""Settings of a server: one frozen dataclass per part, built from options by `gateway.flags`."""

import os
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from gateway.cache_settings import CacheSettings
from gateway.memory_settings import GpuSettings, ModelMemory
from gateway.policy.control import ChangeControl
from gateway.policy.restrictions import Restrictions
from gateway.policy.token_rules import JwtSettings
from gateway.span_settings import SpanSettings
from gateway.storage.mirror.settings import RemoteRepository

ENVIRONMENT: Mapping[str, str] = os.environ
"""The process's environment; only this module reads it."""

MODEL_NAME = "MODEL_NAME"
"""The variable with the name of a model that is a repository of its own."""

MOST_PER_ADDRESS = 256
"""Open connections of one address at one port, by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpTimeLimits:
    """Time limits of HTTP clients in seconds; 0 is no limit.

    `head_secs` is for a request line with its headers, `body_idle_secs` for the next bytes of a
    body, `connection_idle_secs` for the first byte of a request.
    """

    head_secs: float = 10.0
    body_idle_secs: float = 60.0
    connection_idle_secs: float = 75.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """Paths of PEM files; `wire` is the protocol in the names of their options: http or grpc.

    If it is `mutual`, clients need a certificate of an authority in `root`; otherwise `root` may
    be "".
    """

    wire: str
    cert: str
    key: str
    root: str = ""
    mutual: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """The HTTP frontend. Port 0 picks a free one; sizes are bytes, times seconds.

    `header_forward_pattern` is a regular expression, "" for none. `playground` is the page at `/`.
    Requests of an area in `restrictions` need its header; `control` is for those that change the
    server, of which a port without `changes` has no routes. Pages of `cors_origins` may read
    responses, `*` for those of all origins. With `tls` the metrics page has it, too.
    `documentation` is the pages at `/docs`. `allow_record` lets requests of clients be recorded. An
    address has at most `connections_per_address`, 0 for any number.
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
    cors_origins: frozenset[str] = frozenset()
    tls: TlsSettings | None = None
    connections_per_address: int = MOST_PER_ADDRESS
    restrictions: Restrictions = field(default_factory=dict)
    control: ChangeControl = field(default_factory=ChangeControl)
    changes: bool = True
    documentation: bool = True
    allow_record: bool = False


UNIX = "unix:"
"""The prefix of the address of a Unix socket (gRPC: naming)."""


def netloc(address: str, port: int) -> str:
    """The network location of a listener as in a URL; the address of a Unix socket."""
    if address.startswith(UNIX):
        return address
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


class GrpcTransport(StrEnum):
    """HTTP/2 implementations for gRPC: hyper (httpunk) and grpcio."""

    HYPER = "hyper"
    GRPCIO = "grpcio"


class CompressionLevel(StrEnum):
    """Compression of gRPC responses; higher levels are smaller and slower."""

    NONE = "none"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcKeepaliveSettings:
    """Pings and the age of connections, by gRPC's rules.

    The server pings a client after `time_ms` of silence, NEVER_MS for no pings. 0 pings means any
    number, an age of 0 any age.
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
"""gRPC's value for no time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcSettings:
    """The gRPC frontend; port 0 picks a free one.

    `address` may also be `unix:` and the path of a socket, which needs no port.
    `header_forward_pattern` is a regular expression, "" for none. RPCs of an area in `restrictions`
    need its metadata; `control` is for those that change the server, which a port without `changes`
    lacks. A Unix socket has `socket_mode`, by default that of the umask. `reflection` is gRPC's. An
    address has at most `connections_per_address`, 0 for any number.
    """

    enabled: bool = True
    transport: GrpcTransport = GrpcTransport.HYPER
    address: str = "0.0.0.0"
    port: int = 8001
    reuse_port: bool = False
    send_timeout_secs: float = 30.0
    header_forward_pattern: str = ""
    compression: CompressionLevel = CompressionLevel.NONE
    tls: TlsSettings | None = None
    keepalive: GrpcKeepaliveSettings = field(default_factory=GrpcKeepaliveSettings)
    connections_per_address: int = MOST_PER_ADDRESS
    restrictions: Restrictions = field(default_factory=dict)
    control: ChangeControl = field(default_factory=ChangeControl)
    changes: bool = True
    reflection: bool = True
    socket_mode: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSettings:
    """The metrics endpoint; port 0 picks a free one.

    `cpu` and `gpu` include metrics of the machine, read at most once per `interval_ms`. The
    `latencies` select the families of that kind; summaries have the `summary_quantiles`. `gen_ai`
    adds those of OpenTelemetry's conventions. An `open` page needs no API key.
    """

    enabled: bool = True
    address: str = "0.0.0.0"
    port: int = 8002
    open: bool = False
    cpu: bool = True
    gpu: bool = True
    interval_ms: int = 2000
    counter_latencies: bool = True
    histogram_latencies: bool = False
    summary_latencies: bool = False
    gen_ai: bool = False
    summary_quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)


class LogFormat(StrEnum):
    """The format of a log line: of its time, or JSON."""

    DEFAULT = "default"
    ISO8601 = "ISO8601"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """The log: its file ("" is the console), levels and format.

    `escape` writes each message as a JSON string. Clients may name files below `directory`, "" for
    none.
    """

    file: str = ""
    directory: str = ""
    info: bool = True
    warning: bool = True
    error: bool = True
    verbose_level: int = 0
    format: LogFormat = LogFormat.DEFAULT
    escape: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """Traces: levels, sampling and files.

    `levels` are TIMESTAMPS, TENSORS, both, or none: no traces. Every `rate`th request is traced,
    at most `count` (-1: no limit). `log_frequency` is the number of traces per file (`file`.0,
    `file`.1 and so on); with 0 all traces are in one file. Clients may name files below
    `directory`, "" for none. With `spans` traces are spans of OpenTelemetry instead of files.
    """

    file: str = ""
    directory: str = ""
    levels: tuple[str, ...] = ()
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0
    spans: SpanSettings | None = None


class ControlMode(StrEnum):
    """The cause of loads after the start: none, changes of folders, or load requests."""

    NONE = "none"
    POLL = "poll"
    EXPLICIT = "explicit"


EVERY_MODEL = "*"


class GoldenMode(StrEnum):
    """The effect of a golden request that fails: the load fails, a warning, or none is executed."""

    STRICT = "strict"
    WARN = "warn"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """The count of a resource of the rate limiter, on one device or on each (None)."""

    name: str
    count: int
    device: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Repositories, loads, backends and scheduling of models.

    `startup` are the models to load at the start in mode explicit, EVERY_MODEL alone means all.
    `backends` are the settings of each backend; those under "" hold for every one. The folders in
    `backend_directory` are backends written in Python. `summaries` records summaries of latencies.
    `rate_limit` enables the rate limiter, with `resource_limits` if given. An instance without
    progress for `stall_secs` is restarted; 0 is never. `host_policies` are the CPU cores of the
    policies that instance groups name. `model_name` is that of a repository of one model,
    or "". `golden` is the mode of golden requests. A replica whose controller decides on rollouts
    does not load the versions `left_out`, and has no rollouts of its own; None for others.
    """

    repositories: tuple[Path | RemoteRepository, ...] = ()
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
    model_name: str = ""
    backends: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    backend_directory: Path | None = None
    summaries: bool = False
    rate_limit: bool = False
    resource_limits: tuple[ResourceLimit, ...] = ()
    gpus: GpuSettings = field(default_factory=GpuSettings)
    memory: ModelMemory = field(default_factory=ModelMemory)
    stall_secs: float = 0.0
    host_policies: Mapping[str, frozenset[int]] = field(default_factory=dict)
    golden: GoldenMode = GoldenMode.STRICT
    left_out: Mapping[str, Set[int]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumptionSettings:
    """Resumable streams.

    A stream waits for its client for the grace period, and buffers at most `buffer_size` bytes;
    all streams together buffer at most `total_size`.
    """

    grace_secs: float = 30.0
    buffer_size: int = 1024 * 1024
    total_size: int = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings:
    """Requests with deadlines.

    One of `probe` requests that cannot meet their deadline is admitted all the same, 0 for none.
    With `enforce_slo` one is refused also by the wish for its first response, `x-slo-ttft-ms`.
    """

    probe: int = 64
    enforce_slo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """A router or a replica of the fleet `name`.

    Both ends of a connection have the same `secret`, b"" for none, and certificates of one
    authority with `tls`. A router connects to `replicas`, to the name in `dns`, or to replicas on
    Ray, which have the options `ray`. A replica has a `port`, a router may; 0 picks a free one.
    `zone` is that of this machine, "" if unknown.
    """

    name: str = "sluice"
    secret: bytes = field(default=b"", repr=False)
    replicas: tuple[tuple[str, int], ...] = ()
    dns: tuple[str, int] | None = None
    ray: tuple[str, ...] | None = None
    address: str = "127.0.0.1"
    port: int | None = None
    tls: TlsSettings | None = None
    zone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a server.

    `frontends` is the number of processes that accept connections, 0 for none. The event loop polls
    for the next request for at most `stay_awake_us`. Without a key file, `api_keys`, and `jwt`,
    requests need no credential. `audit_log` has a line for each change of the server, `access_log`
    for each request, `state_directory` its rollouts. With `admin` or `grpc_admin`, further
    listeners, changes are answered there only. A `public` server logs its exposure. `fleet` is its
    part in a fleet.
    With `server_timing` every request has a receipt.
    """

    id: str = "triton"
    frontends: int = 0
    stay_awake_us: int = 300
    exit_timeout_secs: float = 30.0
    allow_client_shm: bool = False
    api_keys: Path | None = None
    jwt: JwtSettings | None = None
    audit_log: Path | None = None
    access_log: Path | None = None
    state_directory: Path | None = None
    cache: CacheSettings | None = None
    models: ModelSettings = field(default_factory=ModelSettings)
    resumption: ResumptionSettings = field(default_factory=ResumptionSettings)
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    grpc: GrpcSettings = field(default_factory=GrpcSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    admin: HttpSettings | None = None
    grpc_admin: GrpcSettings | None = None
    public: bool = False
    fleet: FleetSettings | None = None
    log: LogSettings = field(default_factory=LogSettings)
    trace: TraceSettings = field(default_factory=TraceSettings)
    server_timing: bool = False

    @property
    def listeners(self) -> Mapping[str, HttpSettings | GrpcSettings | MetricsSettings]:
        """The listeners that are enabled, by their names in the log."""
        found: Mapping[str, HttpSettings | GrpcSettings | MetricsSettings | None] = {
            "http": self.http,
            "metrics": self.metrics,
            "grpc": self.grpc,
            "admin": self.admin,
            "grpc-admin": self.grpc_admin,
        }
        return {name: each for name, each in found.items() if each is not None and each.enabled}

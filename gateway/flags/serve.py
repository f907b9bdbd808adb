"""Options of `sluice serve`, with Triton's names, and their Settings."""

import argparse
from dataclasses import replace
from pathlib import Path

from gateway.errors import Code, InferenceError
from gateway.flags import cache as cache_flags
from gateway.flags import fleet as fleet_flags
from gateway.flags import grpc as grpc_flags
from gateway.flags import json_web_tokens as jwt_flags
from gateway.flags import models as model_flags
from gateway.flags import telemetry as telemetry_flags
from gateway.flags.devices import add_gpu_flags, gpu_settings
from gateway.flags.exposure import add_flags as add_exposure_flags
from gateway.flags.exposure import exposed, require_closed
from gateway.flags.tls import PEM_FILES, tls_settings
from gateway.flags.tls import add_flags as add_tls_flags
from gateway.flags.values import (
    add_control,
    add_listener,
    add_origins,
    add_restrictions,
    add_truth,
    control,
    count,
    natural,
    origins,
    pattern,
    restrictions,
    seconds,
    seconds_or_never,
    truth,
)
from gateway.settings import (
    ENVIRONMENT,
    MOST_PER_ADDRESS,
    AdmissionSettings,
    FleetSettings,
    HttpSettings,
    HttpTimeLimits,
    ModelSettings,
    ResumptionSettings,
    Settings,
)
from gateway.storage.store import state_root

RESTRICTED = "--http-restricted-api"
FILES = (
    *("--audit-log", "--access-log", "--api-keys", "--jwt-jwks"),
    *(f"--http-{each}" for each in PEM_FILES),
    *(f"--grpc-{each}" for each in PEM_FILES),
    *(f"--fleet-{each}" for each in ("secret-file", *PEM_FILES)),
)
"""The files that clients must not name as logs or traces."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every option of `sluice serve` to the parser."""
    model_flags.add_flags(parser)
    add_gpu_flags(parser)
    _add_http_flags(parser)
    grpc_flags.add_flags(parser)
    add_exposure_flags(parser)
    _add_process_flags(parser)
    jwt_flags.add_flags(parser)
    _add_resumption_flags(parser)
    _add_admission_flags(parser)
    cache_flags.add_flags(parser)
    fleet_flags.add_flags(parser)
    telemetry_flags.add_flags(parser)


def settings(flags: argparse.Namespace) -> Settings:
    """Settings from the parsed options; INVALID_ARG if they contradict each other."""
    require_closed(flags)
    metrics = telemetry_flags.metrics_settings(flags)
    changes = control(flags)
    fleet = fleet_flags.fleet_settings(flags)
    _check_log_directory(flags)
    found = Settings(
        id=flags.id,
        frontends=flags.frontends,
        stay_awake_us=flags.stay_awake_us,
        exit_timeout_secs=flags.exit_timeout_secs,
        allow_client_shm=flags.allow_client_shm,
        api_keys=flags.api_keys,
        jwt=jwt_flags.jwt_settings(flags),
        audit_log=flags.audit_log,
        access_log=flags.access_log,
        state_directory=_state_directory(flags),
        cache=cache_flags.cache_settings(flags, ENVIRONMENT),
        fleet=fleet,
        resumption=_resumption_settings(flags),
        admission=AdmissionSettings(probe=flags.admission_probe, enforce_slo=flags.enforce_slo),
        models=replace(
            _router_models(model_flags.model_settings(flags), fleet),
            left_out=flags.left_out,
            summaries=metrics.summary_latencies,
            gpus=gpu_settings(flags),
        ),
        http=HttpSettings(
            enabled=flags.allow_http,
            playground=not flags.public if flags.playground is None else flags.playground,
            address=flags.http_address,
            port=flags.http_port,
            max_input_size=flags.http_max_input_size,
            header_forward_pattern=flags.http_header_forward_pattern,
            first_response_secs=flags.http_first_response_secs,
            keep_alive_secs=flags.http_keep_alive_secs,
            send_timeout_secs=flags.send_timeout_secs,
            tls=tls_settings(flags, "http"),
            restrictions=restrictions(RESTRICTED, flags.http_restricted_api, "api"),
            control=changes,
            cors_origins=origins(flags),
            connections_per_address=flags.max_connections_per_address,
            allow_record=flags.allow_record,
            limits=HttpTimeLimits(
                head_secs=flags.http_head_timeout_secs,
                body_idle_secs=flags.http_body_idle_secs,
                connection_idle_secs=flags.http_connection_idle_secs,
            ),
        ),
        grpc=replace(
            grpc_flags.grpc_settings(flags),
            control=changes,
            connections_per_address=flags.max_connections_per_address,
        ),
        metrics=metrics,
        log=telemetry_flags.log_settings(flags),
        trace=telemetry_flags.trace_settings(flags),
        server_timing=flags.server_timing,
    )
    return exposed(found, flags)


def _router_models(found: ModelSettings, fleet: FleetSettings | None) -> ModelSettings:
    """The models of a server; those of the repository are at replicas if it is a router of Ray."""
    is_ray = fleet is not None and fleet.ray is not None
    return replace(found, repositories=()) if is_ray else found


def _state_directory(flags: argparse.Namespace) -> Path | None:
    """The state of rollouts; None for a replica whose controller decides on them."""
    if flags.left_out is not None:
        return None
    return flags.state_directory or state_root(ENVIRONMENT)


def _check_log_directory(flags: argparse.Namespace) -> None:
    """INVALID_ARG if clients could name a file that is no log and no trace."""
    if not flags.log_directory:
        return
    folder = Path(flags.log_directory).resolve()
    for option in FILES:
        path = vars(flags)[option.strip("-").replace("-", "_")]
        if isinstance(path, str | Path) and path and folder in Path(path).resolve().parents:
            text = f"{option} {path} is below --log-directory, where clients may name files"
            raise InferenceError(Code.INVALID_ARG, f"{text}: expected it elsewhere")


def _add_http_flags(parser: argparse.ArgumentParser) -> None:
    group, defaults = parser.add_argument_group("HTTP"), HttpSettings()
    add_listener(group, "http", defaults.address, defaults.port)
    group.add_argument(
        "--playground",
        type=truth,
        metavar="true|false",
        help="serve the page at / and the state it shows (default: true, with --public false)",
    )
    group.add_argument(
        "--http-max-input-size",
        type=count,
        default=defaults.max_input_size,
        metavar="BYTES",
        help="largest request body (bytes, default: %(default)s)",
    )
    group.add_argument(
        "--http-header-forward-pattern",
        type=pattern,
        default=defaults.header_forward_pattern,
        metavar="REGEX",
        help="pass headers with matching names as parameters of infer requests (default: none)",
    )
    group.add_argument(
        "--http-first-response-secs",
        type=seconds,
        default=defaults.first_response_secs,
        metavar="SECS",
        help="time that a stream waits for its first response before it sends headers "
        "(seconds, default: %(default)s)",
    )
    group.add_argument(
        "--http-keep-alive-secs",
        type=seconds,
        default=defaults.keep_alive_secs,
        metavar="SECS",
        help="idle time of a stream before it sends a comment (seconds, default: %(default)s)",
    )
    add_restrictions(group, RESTRICTED, "the header NAME")
    add_origins(group)
    add_tls_flags(group, "http")
    _add_time_limits(group, defaults.limits)


def _add_time_limits(group: "argparse._ArgumentGroup", defaults: HttpTimeLimits) -> None:
    texts = {
        "--http-head-timeout-secs": (
            defaults.head_secs,
            "time limit of a request's line and headers, then 408",
        ),
        "--http-body-idle-secs": (
            defaults.body_idle_secs,
            "longest pause of a request's body, then 408",
        ),
        "--http-connection-idle-secs": (
            defaults.connection_idle_secs,
            "idle time after which a connection is closed",
        ),
    }
    for flag, (default, text) in texts.items():
        group.add_argument(
            flag,
            type=seconds_or_never,
            default=default,
            metavar="SECS",
            help=f"{text}; 0 turns the limit off (default: %(default)s)",
        )


def _add_process_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("process")
    add_truth(
        group,
        "--allow-client-shm",
        Settings().allow_client_shm,
        "let clients register shared memory",
    )
    add_truth(
        group,
        "--allow-record",
        HttpSettings().allow_record,
        "let `sluice record` read requests of clients, and their answers",
    )
    add_control(group)
    group.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="requests need one of the API keys of this file, which `sluice key` makes; a changed "
        "file is read again (default: none, requests need no key)",
    )
    group.add_argument(
        "--audit-log",
        type=Path,
        metavar="FILE",
        help="append a line of JSON to this file for each change of the server, made or refused "
        "(default: none)",
    )
    group.add_argument(
        "--state-directory",
        type=Path,
        metavar="FOLDER",
        help="folder of the state of rollouts and of labels, which one server at a time has "
        "(default: sluice in $XDG_STATE_HOME, or in ~/.local/state)",
    )
    group.add_argument(
        "--max-connections-per-address",
        type=natural,
        default=MOST_PER_ADDRESS,
        metavar="N",
        help="open connections of an address of another machine at each port, in each process; 0 "
        "for any number, such as behind a proxy (default: %(default)s)",
    )
    group.add_argument(
        "--frontends",
        type=natural,
        default=Settings().frontends,
        metavar="N",
        help="number of processes that accept HTTP and gRPC connections, and of clients of each "
        "vLLM engine; for more streams than one process can serve (default: %(default)s, the "
        "server itself)",
    )
    group.add_argument(
        "--stay-awake-us",
        type=natural,
        default=Settings().stay_awake_us,
        metavar="US",
        help="busy-poll for the next request if requests arrive within this time; 0 never "
        "(microseconds, default: %(default)s)",
    )
    group.add_argument(
        "--id", default=Settings().id, help="name of the server in its metadata (%(default)s)"
    )
    group.add_argument(
        "--exit-timeout-secs",
        type=seconds,
        default=Settings().exit_timeout_secs,
        metavar="SECS",
        help="time limit of the drain after SIGTERM (seconds, default: %(default)s)",
    )


def _add_resumption_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    group, defaults = parser.add_argument_group("resumable streams"), ResumptionSettings()
    group.add_argument(
        "--resumable-grace-secs",
        type=seconds,
        default=defaults.grace_secs,
        metavar="SECS",
        help="time that a resumable stream waits for its client (seconds, default: %(default)s)",
    )
    group.add_argument(
        "--resumable-buffer-size",
        type=count,
        default=defaults.buffer_size,
        metavar="BYTES",
        help="size of the buffer of a resumable stream (bytes, default: %(default)s)",
    )
    group.add_argument(
        "--resumable-total-size",
        type=count,
        default=defaults.total_size,
        metavar="BYTES",
        help="size of all these buffers together (bytes, default: %(default)s)",
    )


def _add_admission_flags(parser: argparse.ArgumentParser) -> None:
    group, defaults = parser.add_argument_group("deadlines"), AdmissionSettings()
    group.add_argument(
        "--admission-probe",
        type=natural,
        default=defaults.probe,
        metavar="N",
        help="admit one of N requests that cannot meet their deadline, to measure how many would "
        "have; 0 for none (default: %(default)s)",
    )
    add_truth(
        group,
        "--enforce-slo",
        defaults.enforce_slo,
        "refuse requests that cannot meet their header x-slo-ttft-ms",
    )


def _resumption_settings(flags: argparse.Namespace) -> ResumptionSettings:
    """Settings from the parsed options."""
    return ResumptionSettings(
        grace_secs=flags.resumable_grace_secs,
        buffer_size=flags.resumable_buffer_size,
        total_size=flags.resumable_total_size,
    )

"""Options of gRPC: address, transport, TLS, compression and keepalive."""

import argparse

from gateway.flags.tls import add_flags as add_tls_flags
from gateway.flags.tls import tls_settings
from gateway.flags.values import (
    add_listener,
    add_restrictions,
    add_truth,
    address,
    count,
    milliseconds,
    natural,
    pattern,
    restrictions,
    seconds,
)
from gateway.policy.restrictions import GRPC_PREFIX
from gateway.settings import (
    CompressionLevel,
    GrpcKeepaliveSettings,
    GrpcSettings,
    GrpcTransport,
)

RESTRICTED = "--grpc-restricted-protocol"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    group, defaults = parser.add_argument_group("gRPC"), GrpcSettings()
    add_listener(group, "grpc", defaults.address, defaults.port)
    add_truth(
        group,
        "--reuse-grpc-port",
        defaults.reuse_port,
        "share the port with other servers that do (SO_REUSEPORT)",
    )
    group.add_argument(
        "--grpc-transport",
        choices=tuple(map(str, GrpcTransport)),
        default=str(defaults.transport),
        help="HTTP/2 implementation (default: %(default)s)",
    )
    group.add_argument(
        "--grpc-header-forward-pattern",
        type=pattern,
        default=defaults.header_forward_pattern,
        metavar="REGEX",
        help="pass metadata with matching names as request parameters (default: none)",
    )
    group.add_argument(
        "--send-timeout-secs",
        type=seconds,
        default=defaults.send_timeout_secs,
        metavar="SECS",
        help="disconnect a client that reads nothing for this time, on gRPC and on HTTP streams "
        "(seconds, default: %(default)s)",
    )
    group.add_argument(
        "--grpc-infer-response-compression-level",
        type=str.lower,
        choices=tuple(map(str, CompressionLevel)),
        default=str(defaults.compression),
        help="compress responses of ModelInfer and ModelStreamInfer if the client accepts it "
        "(default: %(default)s)",
    )
    add_restrictions(group, RESTRICTED, f"the metadata {GRPC_PREFIX}NAME")
    add_tls_flags(group, "grpc")
    _add_keepalive_flags(group)
    _add_flags_without_effect(group)


def grpc_settings(flags: argparse.Namespace) -> GrpcSettings:
    """Settings from the parsed options; INVALID_ARG for an incomplete set of TLS files."""
    return GrpcSettings(
        enabled=flags.allow_grpc,
        transport=GrpcTransport(flags.grpc_transport),
        address=address("--grpc-address", flags.grpc_address),
        port=flags.grpc_port,
        reuse_port=flags.reuse_grpc_port,
        send_timeout_secs=flags.send_timeout_secs,
        header_forward_pattern=flags.grpc_header_forward_pattern,
        compression=CompressionLevel(flags.grpc_infer_response_compression_level),
        restrictions=restrictions(RESTRICTED, flags.grpc_restricted_protocol, "protocol"),
        tls=tls_settings(flags, "grpc"),
        keepalive=_keepalive(flags),
    )


def _add_keepalive_flags(group: "argparse._ArgumentGroup") -> None:
    defaults = GrpcKeepaliveSettings()
    for name, default, text in (
        ("keepalive-time", defaults.time_ms, "idle time before the server sends a ping"),
        ("keepalive-timeout", defaults.timeout_ms, "time limit for the answer to a ping"),
        (
            "http2-min-recv-ping-interval-without-data",
            defaults.min_recv_ping_interval_ms,
            "least time between pings of a client that is sent no data; a sooner ping is a strike",
        ),
        ("max-connection-age", 0, "age at which a connection is closed, 0 for never"),
        (
            "max-connection-age-grace",
            0,
            "time after that age at which its RPCs are cancelled, 0 for never",
        ),
    ):
        group.add_argument(
            f"--grpc-{name}",
            type=milliseconds,
            default=default,
            metavar="MS",
            help=f"{text} (default: %(default)s)",
        )
    add_truth(
        group,
        "--grpc-keepalive-permit-without-calls",
        defaults.permit_without_calls,
        "allow pings on connections without an RPC",
    )
    for name, default, text in (
        (
            "max-pings-without-data",
            defaults.max_pings_without_data,
            "pings of the server without other data, 0 for any number",
        ),
        (
            "max-ping-strikes",
            defaults.max_ping_strikes,
            "strikes before a connection is closed, 0 for any number",
        ),
    ):
        group.add_argument(
            f"--grpc-http2-{name}",
            type=natural,
            default=default,
            metavar="N",
            help=f"{text} (default: %(default)s)",
        )


def _keepalive(flags: argparse.Namespace) -> GrpcKeepaliveSettings:
    return GrpcKeepaliveSettings(
        time_ms=flags.grpc_keepalive_time,
        timeout_ms=flags.grpc_keepalive_timeout,
        permit_without_calls=flags.grpc_keepalive_permit_without_calls,
        max_pings_without_data=flags.grpc_http2_max_pings_without_data,
        min_recv_ping_interval_ms=flags.grpc_http2_min_recv_ping_interval_without_data,
        max_ping_strikes=flags.grpc_http2_max_ping_strikes,
        max_connection_age_ms=flags.grpc_max_connection_age,
        max_connection_age_grace_ms=flags.grpc_max_connection_age_grace,
    )


def _add_flags_without_effect(group: "argparse._ArgumentGroup") -> None:
    for name, text in (
        ("infer-thread-count", "requests are read on one event loop"),
        ("infer-allocation-pool-size", "messages are not pooled"),
        ("max-response-pool-size", "messages are not pooled"),
    ):
        group.add_argument(
            f"--grpc-{name}",
            type=count,
            metavar="N",
            help=f"accepted for compatibility, no effect: {text}",
        )

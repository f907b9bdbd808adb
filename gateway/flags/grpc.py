"""The flags of gRPC: where and by whose HTTP/2, over TLS, compressed, kept alive."""

import argparse

from gateway.errors import Code, InferenceError
from gateway.flags.values import (
    add_listener,
    add_truth,
    count,
    milliseconds,
    natural,
    pattern,
    seconds,
)
from gateway.settings import (
    UNIX,
    CompressionLevel,
    GrpcKeepaliveSettings,
    GrpcSettings,
    GrpcTlsSettings,
    GrpcTransport,
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add them to those of `sluice serve`."""
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
        help="whose HTTP/2 carries it (default: %(default)s)",
    )
    group.add_argument(
        "--grpc-header-forward-pattern",
        type=pattern,
        default=defaults.header_forward_pattern,
        metavar="REGEX",
        help="metadata whose names match become parameters of the request (default: none)",
    )
    group.add_argument(
        "--send-timeout-secs",
        type=seconds,
        default=defaults.send_timeout_secs,
        metavar="SECS",
        help="a client that takes nothing for so long is gone, on gRPC and on HTTP streams "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--grpc-infer-response-compression-level",
        type=str.lower,
        choices=tuple(map(str, CompressionLevel)),
        default=str(defaults.compression),
        help="of ModelInfer and ModelStreamInfer, as far as the client accepts it "
        "(default: %(default)s)",
    )
    _add_tls_flags(group)
    _add_keepalive_flags(group)
    _add_flags_without_effect(group)


def grpc_settings(flags: argparse.Namespace) -> GrpcSettings:
    """What the flags say; INVALID_ARG if those of TLS do not go together."""
    return GrpcSettings(
        enabled=flags.allow_grpc,
        transport=GrpcTransport(flags.grpc_transport),
        address=_address(flags.grpc_address),
        port=flags.grpc_port,
        reuse_port=flags.reuse_grpc_port,
        send_timeout_secs=flags.send_timeout_secs,
        header_forward_pattern=flags.grpc_header_forward_pattern,
        compression=CompressionLevel(flags.grpc_infer_response_compression_level),
        tls=_tls(flags),
        keepalive=_keepalive(flags),
    )


def _address(text: str) -> str:
    """A host, an IPv6 address also as it stands in a URL, or `unix:` and a path."""
    if not text.startswith(UNIX):
        return text.removeprefix("[").removesuffix("]")
    path = text.removeprefix(UNIX)
    # gRPC (naming): unix:path, or unix:///absolute_path.
    path = path.removeprefix("//") if path.startswith("///") else path
    if not path:
        raise InferenceError(
            Code.INVALID_ARG, f"--grpc-address '{text}' has no path, expected such as unix:/run/s"
        )
    return UNIX + path


def _add_tls_flags(group: "argparse._ArgumentGroup") -> None:
    add_truth(group, "--grpc-use-ssl", False, "serve over TLS")
    add_truth(
        group, "--grpc-use-ssl-mutual", False, "serve over TLS, to clients with a certificate only"
    )
    for name, text in (
        ("server-cert", "the server's certificate, and those between it and its authority's"),
        ("server-key", "the private key of that certificate"),
        ("root-cert", "the authorities that clients' certificates come from"),
    ):
        group.add_argument(
            f"--grpc-{name}", default="", metavar="PEM", help=f"{text} (default: none)"
        )


def _tls(flags: argparse.Namespace) -> GrpcTlsSettings | None:
    mutual = flags.grpc_use_ssl_mutual
    if not (flags.grpc_use_ssl or mutual):
        return None
    found = GrpcTlsSettings(
        cert=flags.grpc_server_cert,
        key=flags.grpc_server_key,
        root=flags.grpc_root_cert,
        mutual=mutual,
    )
    asked = "--grpc-use-ssl-mutual" if mutual else "--grpc-use-ssl"
    _require_pem(asked, "--grpc-server-cert", found.cert)
    _require_pem(asked, "--grpc-server-key", found.key)
    if mutual:
        _require_pem(asked, "--grpc-root-cert", found.root)
    return found


def _require_pem(asked: str, flag: str, path: str) -> None:
    if not path:
        raise InferenceError(
            Code.INVALID_ARG, f"{asked} needs {flag}, the path of a PEM file; none is given"
        )


def _add_keepalive_flags(group: "argparse._ArgumentGroup") -> None:
    defaults = GrpcKeepaliveSettings()
    for name, default, text in (
        ("keepalive-time", defaults.time_ms, "silence before a client is pinged"),
        ("keepalive-timeout", defaults.timeout_ms, "how long it has to answer"),
        (
            "http2-min-recv-ping-interval-without-data",
            defaults.min_recv_ping_interval_ms,
            "a client that pings again sooner, and was sent nothing meanwhile, has a strike",
        ),
        ("max-connection-age", 0, "connections are ended after that, 0 for never"),
        ("max-connection-age-grace", 0, "and cut off so long after, 0 for never"),
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
        "pings are for connections without an RPC, too",
    )
    for name, default, text in (
        (
            "max-pings-without-data",
            defaults.max_pings_without_data,
            "pings to a client that is sent nothing else, 0 for any number",
        ),
        (
            "max-ping-strikes",
            defaults.max_ping_strikes,
            "strikes that a client may have, 0 for any number",
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
            f"--grpc-{name}", type=count, metavar="N", help=f"accepted for Triton's sake: {text}"
        )

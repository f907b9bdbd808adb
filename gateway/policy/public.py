"""The rules of `--public`: parts that a server in front of strangers must not leave open."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.policy.caller import is_this_machine
from gateway.policy.pages import ANY_ORIGIN

Options = Mapping[str, Any]
"""The values of options by name, with `_` for `-`."""


@dataclass(frozen=True, slots=True)
class PublicRule:
    """A part of the server, the options that close it, and whether some options leave it open."""

    part: str
    fix: str
    is_open: Callable[[Options], bool]


def _is_local(address: str) -> bool:
    return is_this_machine(address.strip("[]"))


def _has_remote_admin(options: Options, name: str) -> bool:
    """Whether an admin port is open to other machines."""
    has_port = options[f"{name}_port"] is not None
    return has_port and not _is_local(options[f"{name}_address"])


def _has_remote_metrics(options: Options) -> bool:
    address = options["metrics_address"] or options["http_address"]
    return options["allow_metrics"] and not _is_local(address)


def _has_http(options: Options) -> bool:
    """Whether a port of HTTP is open to clients behind a proxy, or to other machines."""
    others = _has_remote_metrics(options) or _has_remote_admin(options, "admin")
    return options["allow_http"] or others


def _has_grpc(options: Options) -> bool:
    return options["allow_grpc"] or _has_remote_admin(options, "grpc_admin")


def _is_plain(options: Options, wire: str) -> bool:
    """Whether a wire has no TLS, neither here nor at a proxy."""
    return not (
        options["behind_proxy"] or options[f"{wire}_use_ssl"] or options[f"{wire}_use_ssl_mutual"]
    )


RULES: Sequence[PublicRule] = (
    PublicRule(
        "requests without an API key or a token",
        "--api-keys=FILE, which `sluice key` makes, or --jwt-jwks",
        lambda options: options["api_keys"] is None and options["jwt_jwks"] is None,
    ),
    PublicRule(
        "HTTP without TLS",
        "--http-use-ssl=true with a certificate, or --behind-proxy if a proxy has TLS",
        lambda options: _has_http(options) and _is_plain(options, "http"),
    ),
    PublicRule(
        "gRPC without TLS",
        "--grpc-use-ssl=true with a certificate, or --behind-proxy if a proxy has TLS",
        lambda options: _has_grpc(options) and _is_plain(options, "grpc"),
    ),
    PublicRule(
        "changes of the server by every machine",
        "--open-control=false",
        lambda options: options["open_control"],
    ),
    PublicRule(
        "metrics without an API key at an address of the network",
        "--metrics-open=false, or --metrics-address=127.0.0.1",
        lambda options: options["metrics_open"] and _has_remote_metrics(options),
    ),
    PublicRule(
        "responses for pages of all origins",
        "--cors-origin=ORIGIN instead of *",
        lambda options: ANY_ORIGIN in options["cors_origin"],
    ),
    PublicRule(
        "the page at /",
        "--playground=false",
        lambda options: options["playground"] is True,
    ),
    PublicRule(
        "shared memory of clients",
        "--allow-client-shm=false",
        lambda options: options["allow_client_shm"],
    ),
    PublicRule(
        "headers that models get",
        "no --http-header-forward-pattern",
        lambda options: options["http_header_forward_pattern"] != "",
    ),
    PublicRule(
        "metadata that models get",
        "no --grpc-header-forward-pattern",
        lambda options: options["grpc_header_forward_pattern"] != "",
    ),
)
"""All of them; the page of this package has the table."""


def left_open(options: Options) -> Sequence[PublicRule]:
    """The rules that some options break."""
    return [rule for rule in RULES if rule.is_open(options)]

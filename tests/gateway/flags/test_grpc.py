"""Options of gRPC become settings; conflicting options are refused."""

import argparse

import pytest

from gateway.errors import InferenceError
from gateway.flags import grpc as flags
from gateway.settings import (
    CompressionLevel,
    GrpcKeepaliveSettings,
    GrpcSettings,
    GrpcTransport,
    netloc,
)


def parse(*arguments: str) -> GrpcSettings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    flags.add_flags(parser)
    return flags.grpc_settings(parser.parse_args(arguments))


def test_without_flags_the_defaults_hold() -> None:
    assert parse() == GrpcSettings()


def test_the_defaults_of_keep_alive_are_tritons() -> None:
    assert parse().keepalive == GrpcKeepaliveSettings(
        time_ms=7_200_000,
        timeout_ms=20_000,
        permit_without_calls=False,
        max_pings_without_data=2,
        min_recv_ping_interval_ms=300_000,
        max_ping_strikes=2,
        max_connection_age_ms=0,
        max_connection_age_grace_ms=0,
    )


def test_each_flag_is_a_setting() -> None:
    found = parse(
        *("--allow-grpc=false", "--grpc-transport=hyper", "--grpc-address=10.0.0.1"),
        *("--grpc-port=0", "--reuse-grpc-port=true", "--send-timeout-secs=2"),
        *("--grpc-header-forward-pattern=x-.*", "--grpc-infer-response-compression-level=high"),
    )
    assert found == GrpcSettings(
        enabled=False,
        transport=GrpcTransport.HYPER,
        address="10.0.0.1",
        port=0,
        reuse_port=True,
        send_timeout_secs=2.0,
        header_forward_pattern="x-.*",
        compression=CompressionLevel.HIGH,
    )


def test_each_flag_of_keep_alive_is_a_setting() -> None:
    found = parse(
        *("--grpc-keepalive-time=1", "--grpc-keepalive-timeout=2"),
        *("--grpc-keepalive-permit-without-calls=1", "--grpc-http2-max-pings-without-data=3"),
        "--grpc-http2-min-recv-ping-interval-without-data=4",
        *("--grpc-http2-max-ping-strikes=5", "--grpc-max-connection-age=6"),
        "--grpc-max-connection-age-grace=7",
    )
    assert found.keepalive == GrpcKeepaliveSettings(
        time_ms=1,
        timeout_ms=2,
        permit_without_calls=True,
        max_pings_without_data=3,
        min_recv_ping_interval_ms=4,
        max_ping_strikes=5,
        max_connection_age_ms=6,
        max_connection_age_grace_ms=7,
    )


@pytest.mark.parametrize("text", ["none", "LOW", "Medium", "high"])
def test_a_level_is_written_in_any_case(text: str) -> None:
    found = parse(f"--grpc-infer-response-compression-level={text}")
    assert found.compression is CompressionLevel(text.lower())


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("localhost", "localhost"),
        ("unix:grpc.sock", "unix:grpc.sock"),
        ("unix:/run/grpc.sock", "unix:/run/grpc.sock"),
        ("unix:///run/grpc.sock", "unix:/run/grpc.sock"),
    ],
)
def test_an_address_may_be_written_as_grpc_writes_it(text: str, address: str) -> None:
    assert parse(f"--grpc-address={text}").address == address


@pytest.mark.parametrize(
    ("address", "shown"),
    [("0.0.0.0", "0.0.0.0:8001"), ("::1", "[::1]:8001"), ("unix:/run/s", "unix:/run/s")],
)
def test_an_address_is_shown_with_the_port_it_has(address: str, shown: str) -> None:
    assert netloc(address, 8001) == shown


def test_a_unix_socket_needs_a_path() -> None:
    with pytest.raises(InferenceError, match="'unix:' has no path, expected such as unix:/run/s"):
        parse("--grpc-address=unix:")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--grpc-transport", "nghttp2"),
        ("--grpc-infer-response-compression-level", "extreme"),
        ("--grpc-use-ssl", "maybe"),
        ("--grpc-keepalive-time", "-1"),
        ("--grpc-keepalive-time", "2147483648"),
        ("--grpc-keepalive-timeout", "20s"),
        ("--grpc-http2-max-ping-strikes", "two"),
        ("--grpc-max-connection-age", "1.5"),
        ("--grpc-infer-thread-count", "0"),
    ],
)
def test_a_bad_value_is_refused_with_what_was_found(flag: str, value: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=value):
        parse(f"{flag}={value}")


def test_flags_of_tritons_that_have_no_meaning_here_are_accepted() -> None:
    names = ("infer-thread-count", "infer-allocation-pool-size", "max-response-pool-size")
    assert parse(*(f"--grpc-{name}=2" for name in names)) == GrpcSettings()

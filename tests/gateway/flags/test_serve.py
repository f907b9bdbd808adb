"""Flags with Triton's names become Settings, and bad values are refused with their name."""

import argparse
from pathlib import Path

import pytest

from gateway.errors import InferenceError
from gateway.flags import serve as flags
from gateway.policy.control import ChangeControl
from gateway.settings import HttpTimeLimits, Settings

JWT = ("--jwt-jwks=f", "--jwt-issuer=a", "--jwt-audience=b")


def parse(*arguments: str) -> Settings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    flags.add_flags(parser)
    return flags.settings(parser.parse_args(["--model-repository", "models", *arguments]))


def test_defaults_are_tritons() -> None:
    settings = parse()
    assert (settings.http.port, settings.grpc.port, settings.metrics.port) == (8000, 8001, 8002)
    assert settings.exit_timeout_secs == 30
    assert settings.http.max_input_size == 64 * 1024 * 1024
    assert settings.models.exit_on_error
    assert settings.models.strict_readiness


def test_a_repository_may_be_given_several_times_under_both_names() -> None:
    settings = parse("--model-store=more")
    assert settings.models.repositories == (Path("models"), Path("more"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("true", True), ("ON", True), ("1", True), ("False", False), ("off", False), ("0", False)],
)
def test_booleans_are_written_as_triton_writes_them(text: str, *, expected: bool) -> None:
    assert parse(f"--strict-readiness={text}").models.strict_readiness is expected


def test_metrics_listen_at_the_address_of_http_by_default() -> None:
    assert parse("--http-address=127.0.0.1").metrics.address == "127.0.0.1"
    assert parse("--http-address=127.0.0.1", "--metrics-address=::1").metrics.address == "::1"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--http-port", "65536"),
        ("--grpc-port", "-1"),
        ("--metrics-port", "http"),
        ("--exit-on-error", "maybe"),
        ("--exit-timeout-secs", "0"),
        ("--exit-timeout-secs", "inf"),
        ("--http-max-input-size", "0"),
        ("--http-head-timeout-secs", "-1"),
        ("--http-body-idle-secs", "soon"),
        ("--http-connection-idle-secs", "inf"),
        ("--model-load-thread-count", "two"),
    ],
)
def test_a_bad_value_is_refused_with_what_was_found(flag: str, value: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=value):
        parse(f"{flag}={value}")


def test_the_playground_is_there_unless_it_is_turned_off() -> None:
    assert parse().http.playground
    assert not parse("--playground=false").http.playground


def test_the_server_is_changed_from_this_machine_only_unless_it_is_open() -> None:
    settings = parse()
    assert settings.http.control == settings.grpc.control == ChangeControl(is_open=False)
    settings = parse("--open-control=true", "--allowed-hosts=A,b", "--allowed-hosts=10.0.0.5")
    expected = ChangeControl(is_open=True, hosts=frozenset({"a", "b", "10.0.0.5"}))
    assert settings.http.control == settings.grpc.control == expected


def test_a_host_with_a_port_is_refused_by_the_option() -> None:
    with pytest.raises(InferenceError, match="--allowed-hosts: 'a:80': expected the name or"):
        parse("--allowed-hosts=a:80")


def test_pages_of_other_origins_read_nothing_unless_they_are_named() -> None:
    assert parse().http.cors_origins == frozenset()
    found = parse("--cors-origin=https://A.example", "--cors-origin=http://b:80", "--api-keys=f")
    assert found.http.cors_origins == {"https://a.example", "http://b"}
    assert parse("--cors-origin=*").http.cors_origins == {"*"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--cors-origin=https://a.example/"], "'https://a.example/': expected SCHEME://HOST"),
        (["--cors-origin=null"], "'null': expected SCHEME://HOST"),
        (["--cors-origin=*", "--api-keys=f"], r"'\*' lets every page .* name each origin"),
        (["--cors-origin=*", *JWT], r"'\*' lets every page .* name each origin"),
    ],
)
def test_an_origin_that_is_none_and_a_star_with_keys_are_refused(
    flags: list[str], said: str
) -> None:
    with pytest.raises(InferenceError, match=f"--cors-origin: {said}"):
        parse(*flags)


def test_time_limits_of_http_have_defaults_and_0_turns_each_off() -> None:
    assert parse().http.limits == HttpTimeLimits()
    flags = ("--http-head-timeout-secs", "--http-body-idle-secs", "--http-connection-idle-secs")
    off = parse(*(f"{flag}=0" for flag in flags)).http.limits
    assert (off.head_secs, off.body_idle_secs, off.connection_idle_secs) == (0, 0, 0)
    assert parse("--http-body-idle-secs=2.5").http.limits.body_idle_secs == 2.5


@pytest.mark.parametrize("flag", ["--audit-log", "--api-keys", "--http-server-key"])
def test_clients_cannot_name_the_other_files_of_the_server(tmp_path: Path, flag: str) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    for file in (folder / "a", folder / "inner" / "a", tmp_path / "link" / "a"):
        with pytest.raises(InferenceError, match=f"^{flag} {file} is below --log-directory"):
            parse(f"--log-directory={folder}", f"{flag}={file}")
    parse(f"--log-directory={folder}", f"{flag}={tmp_path}/logs2/a")
    parse(f"{flag}={folder}/a")


def test_the_audit_log_is_a_file() -> None:
    assert parse().audit_log is None
    assert parse("--audit-log=a/b").audit_log == Path("a/b")


def test_connections_of_an_address_are_limited_and_0_turns_the_limit_off() -> None:
    for given, most in (((), 256), (("--max-connections-per-address=0",), 0)):
        settings = parse(*given)
        assert settings.http.connections_per_address == most
        assert settings.grpc.connections_per_address == most
    with pytest.raises(argparse.ArgumentError):
        parse("--max-connections-per-address=-1")


def test_port_0_is_allowed() -> None:
    assert parse("--http-port=0").http.port == 0

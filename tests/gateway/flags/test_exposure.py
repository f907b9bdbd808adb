"""Options of admin ports and of `--public`, and the settings that follow."""

import argparse

import pytest

from gateway.errors import InferenceError
from gateway.flags import serve as flags
from gateway.settings import Settings

TLS = [
    f"--{wire}-{rest}"
    for wire in ("http", "grpc")
    for rest in ("use-ssl=true", "server-cert=c.pem", "server-key=k.pem")
]


def parse(*arguments: str) -> Settings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    flags.add_flags(parser)
    return flags.settings(parser.parse_args(["--model-repository=models", *arguments]))


def test_without_an_admin_port_every_port_answers_changes() -> None:
    settings = parse()
    assert (settings.admin, settings.grpc_admin) == (None, None)
    assert settings.http.changes
    assert settings.grpc.changes
    assert list(settings.listeners) == ["http", "metrics", "grpc"]


@pytest.mark.parametrize("option", ["--admin-port=9000", "--grpc-admin-address=unix:/run/s"])
def test_with_an_admin_port_of_one_wire_neither_wire_answers_changes_elsewhere(
    option: str,
) -> None:
    settings = parse(option)
    assert not settings.http.changes
    assert not settings.grpc.changes
    (admin,) = [each for each in (settings.admin, settings.grpc_admin) if each is not None]
    assert admin.changes


def test_an_admin_port_has_the_settings_of_its_wire_at_an_address_of_its_own() -> None:
    settings = parse(
        *("--admin-port=0", "--grpc-admin-port=9001", "--grpc-admin-address=[::1]", *TLS),
        *("--http-max-input-size=7", "--reuse-grpc-port=true", "--grpc-address=10.0.0.5"),
    )
    assert settings.admin is not None
    assert (settings.admin.address, settings.admin.port) == ("127.0.0.1", 0)
    assert (settings.admin.tls, settings.admin.max_input_size) == (settings.http.tls, 7)
    assert settings.grpc_admin is not None
    assert (settings.grpc_admin.address, settings.grpc_admin.port) == ("::1", 9001)
    assert settings.grpc_admin.tls == settings.grpc.tls
    assert not settings.grpc_admin.reuse_port
    assert settings.grpc.reuse_port


def test_an_admin_port_needs_no_other_port_of_its_wire() -> None:
    settings = parse("--allow-http=false", "--admin-port=0", "--allow-grpc=false")
    assert list(settings.listeners) == ["metrics", "admin"]


def test_an_admin_socket_is_only_for_the_user_of_the_server() -> None:
    settings = parse("--grpc-admin-address=unix:///run/g", "--admin-address=unix:/run/h")
    assert settings.grpc_admin is not None
    assert settings.admin is not None
    assert (settings.grpc_admin.address, settings.grpc_admin.socket_mode) == ("unix:/run/g", 0o600)
    assert settings.admin.address == "unix:/run/h"
    assert settings.grpc.socket_mode is None


@pytest.mark.parametrize("name", ["admin", "grpc-admin"])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["address=10.0.0.5"], "--{0}-address '10.0.0.5' needs --{0}-port; none is given"),
        (["address=unix:"], "--{0}-address 'unix:' has no path, expected such as unix:/run/s"),
        (
            ["address=unix:/s", "port=9000"],
            "--{0}-address 'unix:/s' has no port, found --{0}-port=9000",
        ),
    ],
)
def test_a_half_of_an_admin_port_is_refused(name: str, options: list[str], text: str) -> None:
    with pytest.raises(InferenceError) as caught:
        parse(*(f"--{name}-{each}" for each in options))
    assert str(caught.value) == text.format(name)


def test_a_public_server_shuts_what_strangers_do_not_need() -> None:
    settings = parse("--public", "--api-keys=keys", *TLS)
    assert settings.public
    for wire in (settings.http, settings.grpc):
        assert not wire.changes
        assert wire.header_forward_pattern == ""
    assert not settings.http.playground
    assert not settings.http.documentation
    assert not settings.grpc.reflection
    assert not settings.allow_client_shm
    assert settings.admin is settings.grpc_admin is None


def test_a_public_server_answers_changes_at_its_admin_port() -> None:
    settings = parse("--public", "--api-keys=keys", "--behind-proxy", "--admin-port=0")
    assert settings.admin is not None
    assert settings.admin.changes
    assert not settings.admin.playground
    assert not settings.admin.documentation


def test_other_servers_have_all_parts() -> None:
    settings = parse("--behind-proxy", "--admin-port=0")
    assert settings.http.playground
    assert settings.http.documentation
    assert settings.grpc.reflection
    assert not settings.public

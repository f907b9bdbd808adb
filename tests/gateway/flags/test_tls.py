"""Options of TLS become settings, alike for HTTP and gRPC; an incomplete set is refused."""

import argparse

import pytest

from gateway.errors import InferenceError
from gateway.flags import serve as flags
from gateway.settings import TlsSettings

WIRES = pytest.mark.parametrize("wire", ["http", "grpc"])


def parse(wire: str, *arguments: str) -> TlsSettings | None:
    """The settings of a protocol by its options without `--http-` or `--grpc-`."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    flags.add_flags(parser)
    given = ["--model-repository=m", *(f"--{wire}-{each}" for each in arguments)]
    found = flags.settings(parser.parse_args(given))
    return found.http.tls if wire == "http" else found.grpc.tls


PEM = ("server-cert=cert.pem", "server-key=key.pem")


@WIRES
def test_tls_is_off_unless_it_is_requested_even_with_files(wire: str) -> None:
    assert parse(wire, *PEM, "root-cert=root.pem") is None
    assert parse(wire, "use-ssl=false", "use-ssl-mutual=false", *PEM) is None


@WIRES
def test_mutual_tls_is_tls(wire: str) -> None:
    assert parse(wire, "use-ssl=1", *PEM) == TlsSettings(wire=wire, cert="cert.pem", key="key.pem")
    found = parse(wire, "use-ssl-mutual=true", *PEM, "root-cert=root.pem")
    assert found == TlsSettings(
        wire=wire, cert="cert.pem", key="key.pem", root="root.pem", mutual=True
    )


@WIRES
@pytest.mark.parametrize(
    ("arguments", "asked", "missing"),
    [
        (("use-ssl=true",), "use-ssl", "server-cert"),
        (("use-ssl=true", PEM[0]), "use-ssl", "server-key"),
        (("use-ssl-mutual=true", *PEM), "use-ssl-mutual", "root-cert"),
    ],
)
def test_a_file_that_is_missing_is_named(
    wire: str, arguments: tuple[str, ...], asked: str, missing: str
) -> None:
    says = f"^--{wire}-{asked} needs --{wire}-{missing}, the path of a PEM file; none is given"
    with pytest.raises(InferenceError, match=says):
        parse(wire, *arguments)


@WIRES
def test_a_value_that_is_no_bool_is_refused(wire: str) -> None:
    with pytest.raises(argparse.ArgumentError, match="maybe"):
        parse(wire, "use-ssl=maybe")

"""Clients with certificates: the key file lists their names, on both wires and all servers."""

import ssl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import grpc
import httpx
import openai
import pytest

from gateway.policy.keys import new_key
from tests.certificates import Authority, Certificate
from tests.conformance.keys import ECHO, INFER, NOTICED_SECS, bearer, message_of, stored, write
from tests.conformance.models import REPEAT, identity
from tests.conformance.tls import flags, https, session, stub
from tests.rpc import infer_request, streaming
from tests.serving import WAIT_SECS, Serving, serving, wait_until, write_model

pytestmark = pytest.mark.runs_on("grpcio", "frontends")

KEYS = {"web": new_key(), "other": new_key()}
WEB, OPS, OLD = "URI:spiffe://prod/ns/web/sa/frontend", "DNS:ops.example", "CN:retired"
LONG = {"text_input": "x", "n": 100_000, "delay_us": 10_000}
EXPECTED = "expected 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
NO_LONGER = "the credential of the request is no longer valid"
"""The names of the entries; the server's own certificate is `localhost`, which is not listed."""


def entry(san: str, tenant: str, *more: str) -> str:
    return "\n".join(["[[certificates]]", f'san = "{san}"', f'tenant = "{tenant}"', *more])


LISTED = (
    entry(OPS, "ops", 'roles = ["admin", "observe"]'),
    entry(OLD, "web", "expires = 2001-01-01T00:00:00Z"),
    *(stored(made, tenant) for tenant, made in KEYS.items()),
)


@pytest.fixture(scope="module")
def shown(authority: Authority) -> Mapping[str, Certificate]:
    """The certificates of clients."""
    names = {
        "web": "URI:spiffe://prod/ns/web/sa/frontend,DNS:web.example",
        "ops": "DNS:OPS.example",
        "retired": "",
        "stranger": "DNS:stranger.example",
    }
    found = {name: authority.issue(name, value) for name, value in names.items()}
    return {
        **found,
        "unnamed": authority.issue("", "IP:127.0.0.1"),
        # A CN with the text of a name of another kind.
        "impostor": authority.issue(WEB.replace("/", r"\/"), ""),
    }


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    write(file, entry(WEB, "web"), *LISTED)
    return file


@pytest.fixture(scope="module")
def server(
    authority: Authority,
    key_file: Path,
    server_kind: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Serving]:
    models = tmp_path_factory.mktemp("models")
    write_model(models, "single", identity("BYTES", "1"))
    write_model(models, "repeat", REPEAT)
    own, root = authority.issue("localhost"), str(authority.root)
    both = (*flags("http", own, root), *flags("grpc", own, root))
    with serving(models, *both, f"--api-keys={key_file}", "--exit-timeout-secs=1") as started:
        yield started
    assert started.process.returncode == 0
    assert "Traceback" not in started.text


Ask = Callable[[str, str], tuple[int, str]]
STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
}


@pytest.fixture(params=["http", "grpc"])
def ask(
    request: pytest.FixtureRequest,
    server: Serving,
    authority: Authority,
    shown: Mapping[str, Certificate],
) -> Ask:
    """The status of an inference with a certificate and perhaps a key, and the text of an error."""

    def over_http(name: str, key: str) -> tuple[int, str]:
        headers = bearer(key) if key else {}
        with client(server, authority, shown[name]) as http:
            answer = http.post(INFER, json=ECHO, headers=headers)
        return answer.status_code, "" if answer.status_code == 200 else message_of(answer)

    def over_grpc(name: str, key: str) -> tuple[int, str]:
        metadata = [("x-api-key", key)] if key else []
        with stub(server, authority, shown[name]) as found:
            try:
                found.ModelInfer(
                    infer_request("single", INPUT="hi"), metadata=metadata, timeout=WAIT_SECS
                )
            except grpc.RpcError as error:
                return STATUS[error.code()], error.details()
        return 200, ""

    return over_http if request.param == "http" else over_grpc


def client(server: Serving, authority: Authority, mine: Certificate) -> httpx.Client:
    context = authority.client(mine)
    return httpx.Client(base_url=https(server), verify=context, timeout=WAIT_SECS)


MISSING = "the API key is missing and the certificate "


@pytest.mark.parametrize(
    ("name", "key", "status", "text"),
    [
        ("web", "", 200, ""),
        ("web", "web", 200, ""),
        ("web", "none", 200, ""),
        ("web", "other", 400, f"the certificate '{WEB}' and the API key 'ID' are of two tenants"),
        ("ops", "", 403, f"the certificate '{OPS}' has the role observe or admin, expected infer"),
        ("ops", "web", 400, f"the certificate '{OPS}' and the API key 'ID' are of two tenants"),
        ("retired", "", 401, f"the certificate '{OLD}' is no longer valid here"),
        ("retired", "web", 401, f"the certificate '{OLD}' is no longer valid here"),
        ("stranger", "", 401, f"{MISSING}'DNS:stranger.example' is not listed, {EXPECTED}"),
        ("stranger", "web", 200, ""),
        ("stranger", "none", 401, "the API key is not valid"),
        ("impostor", "", 401, f"{MISSING}'CN:{WEB}' is not listed, {EXPECTED}"),
        ("unnamed", "", 401, f"{MISSING}has no URI, DNS name or CN, {EXPECTED}"),
        ("unnamed", "other", 200, ""),
    ],
)
def test_a_listed_certificate_decides_and_others_are_those_of_strangers(
    ask: Ask, name: str, key: str, status: int, text: str
) -> None:
    given, key_id, _ = KEYS.get(key, (key, "", b""))
    found, said = ask(name, given)
    assert found == status
    assert said.startswith(text.replace("ID", key_id) if key_id else text)


def test_the_roles_of_a_certificate_hold_on_every_route(
    server: Serving, authority: Authority, shown: Mapping[str, Certificate]
) -> None:
    for name, status in (("ops", 200), ("web", 403), ("stranger", 401)):
        with client(server, authority, shown[name]) as http:
            assert http.get("/v2/models/stats").status_code == status
            assert http.post("/v2/logging", json={}).status_code == status
            page = http.get(f"{https(server, 'metrics')}/metrics")
            assert page.status_code == status
            assert http.get("/v2/health/live").status_code == 200


def test_a_connection_keeps_its_identity_over_requests_with_and_without_a_key(
    server: Serving, authority: Authority, shown: Mapping[str, Certificate]
) -> None:
    other = bearer(KEYS["other"][0])
    with client(server, authority, shown["web"]) as http:
        for _ in range(3):
            assert http.post(INFER, json=ECHO).status_code == 200
            assert http.post(INFER, json=ECHO, headers=other).status_code == 400


def test_openais_client_passes_with_a_certificate(
    server: Serving, authority: Authority, shown: Mapping[str, Certificate]
) -> None:
    with (
        client(server, authority, shown["web"]) as http,
        openai.OpenAI(base_url=f"{https(server)}/v1", api_key="none", http_client=http) as found,
    ):
        assert [each.id for each in found.models.list()] == []


@pytest.mark.parametrize("fault", ["none", "foreign", "expired"])
def test_a_client_that_is_not_verified_gets_an_alert(
    server: Serving,
    authority: Authority,
    shown: Mapping[str, Certificate],
    tmp_path: Path,
    fault: str,
) -> None:
    alerts = {"none": "REQUIRED", "foreign": "UNKNOWN_CA", "expired": "EXPIRED"}
    mine = None
    if fault == "foreign":
        mine = Authority(tmp_path / "foreign").issue("web", "URI:spiffe://prod/ns/web/sa/frontend")
    elif fault == "expired":
        mine = authority.issue_expired("expired")
    context = authority.client(mine)
    with client(server, authority, shown["web"]) as http:
        assert http.post(INFER, json=ECHO).status_code == 200
        with session(server, context) as found:
            found.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with pytest.raises(ssl.SSLError, match=alerts[fault]):
                found.recv(1)
        assert http.post(INFER, json=ECHO).status_code == 200


def test_the_streams_of_a_certificate_end_when_its_entry_is_removed(
    server: Serving,
    authority: Authority,
    shown: Mapping[str, Certificate],
    key_file: Path,
    ask: Ask,
) -> None:
    """Those of other certificates, and of keys, continue."""
    path = "/v2/models/repeat/generate_stream"
    kept = [("x-api-key", KEYS["other"][0])]
    with (
        client(server, authority, shown["web"]) as http,
        stub(server, authority, shown["web"]) as web,
        stub(server, authority, shown["stranger"]) as stranger,
        streaming(web) as revoked,
        streaming(stranger, metadata=kept) as going,
        http.stream("POST", path, json=LONG) as events,
    ):
        lines = (line for line in events.iter_lines() if line.startswith("data: "))
        assert '"x"' in next(lines)
        revoked.ask(infer_request("repeat", "one", **LONG))
        going.ask(infer_request("repeat", "two", **LONG))
        assert not revoked.answer().error_message
        try:
            write(key_file, *LISTED)
            assert NO_LONGER in list(lines)[-1]
            answer = revoked.answer()
            while not answer.error_message:
                answer = revoked.answer()
            assert answer.error_message == NO_LONGER
            assert ask("web", "")[0] == 401
            assert not going.answer().error_message
        finally:
            write(key_file, entry(WEB, "web"), *LISTED)
    wait_until(lambda: ask("web", "")[0] == 200, "listed again", NOTICED_SECS)

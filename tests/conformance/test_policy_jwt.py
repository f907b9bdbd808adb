"""JSON Web Tokens on a server with API keys: over HTTP and gRPC, and after their expiry."""

import stat
import time
from collections.abc import Iterator

import grpc
import httpx
import openai
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from gateway.policy.keys import new_key
from tests.conformance.keys import (
    ECHO,
    INFER,
    NOTICED_SECS,
    bearer,
    message_of,
    status_of,
    stored,
    write,
)
from tests.conformance.models import CATALOGUE, REPEAT
from tests.issuer import (
    AUDIENCE,
    ISSUER,
    IssuerServer,
    SigningKey,
    answer,
    issuer_server,
    key_set,
)
from tests.leaving import IN_FLIGHT, accepted
from tests.raw import Connection
from tests.rpc import connected, infer_request, streaming
from tests.serving import WAIT_SECS, Serving, serving, wait_until, write_model

pytestmark = pytest.mark.runs_on("grpcio", "frontends")

SERVICE = "/inference.GRPCInferenceService"
SIGNING = SigningKey("one", "RS256")
API_KEY = new_key()
TOKEN = SIGNING.token(exp=4_000_000_000, jti="marker")
OBSERVER = SIGNING.token(exp=4_000_000_000, roles="openid observe")
WRONG = "the API key or token is not valid"
WRONG_TOKENS = {
    "forged": SigningKey("one", "ES256").token(),
    "of another issuer": SIGNING.token(iss="https://other.example"),
    "for others": SIGNING.token(aud="other"),
    "expired": SIGNING.token(exp=1),
    "of an unknown key": SIGNING.token({"kid": "../two"}),
    "without a tenant": SIGNING.token(tenant=None),
}
LONG = {"text_input": "x", "n": 100_000, "delay_us": 10_000}
STREAM = "/v2/models/repeat/generate_stream"
NO_LONGER = "the credential of the request is no longer valid"


@pytest.fixture(scope="module")
def issuer() -> Iterator[IssuerServer]:
    with issuer_server(answer(key_set(SIGNING))) as found:
        yield found


@pytest.fixture(scope="module")
def server(
    issuer: IssuerServer,
    environment: dict[str, str],
    server_kind: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("jwt")
    key_file, store, models = folder / "keys.toml", folder / "store", folder / "models"
    write(key_file, stored(API_KEY))
    write_model(models, "repeat", REPEAT)
    for name in ("single", "endless"):
        write_model(models, name, CATALOGUE[name])
    flags = (f"--jwt-jwks={issuer.url}", f"--jwt-issuer={ISSUER}", f"--jwt-audience={AUDIENCE}")
    flags = (*flags, "--jwt-leeway-secs=0", f"--api-keys={key_file}", "--metrics-open=true")
    flags = (*flags, f"--model-store-path={store}")
    with serving(models, *flags, environment=environment) as started:
        yield started
    (kept,) = store.rglob("key_sets/*")
    assert (kept.read_text(), stat.S_IMODE(kept.stat().st_mode)) == (key_set(SIGNING), 0o600)
    assert started.process.returncode == 0
    assert "Traceback" not in started.text
    for token in (TOKEN, *WRONG_TOKENS.values()):
        assert not any(part in started.text for part in token.split("."))
    assert "secret=" not in started.text


@pytest.fixture
def http(server: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http, timeout=WAIT_SECS) as client:
        yield client


def test_a_request_needs_a_token_or_a_key(http: httpx.Client) -> None:
    missing = http.post(INFER, json=ECHO)
    assert missing.status_code == 401
    assert message_of(missing).startswith("the API key or token is missing, expected")
    for credential in (TOKEN, API_KEY[0]):
        assert http.post(INFER, json=ECHO, headers=bearer(credential)).status_code == 200
    forbidden = http.post(INFER, json=ECHO, headers=bearer(OBSERVER))
    assert forbidden.status_code == 403
    assert message_of(forbidden) == "the token has the role observe, expected infer"
    assert http.get("/v2/models/stats", headers=bearer(OBSERVER)).status_code == 200
    both = http.post(INFER, json=ECHO, headers={**bearer(TOKEN), "x-api-key": API_KEY[0]})
    assert both.status_code == 400


@pytest.mark.parametrize("name", WRONG_TOKENS)
def test_a_wrong_token_is_refused_by_one_text(
    server: Serving, http: httpx.Client, name: str
) -> None:
    headers = bearer(WRONG_TOKENS[name])
    refused = http.post(INFER, json=ECHO, headers=headers)
    assert (refused.status_code, message_of(refused)) == (401, WRONG)
    assert refused.headers["www-authenticate"] == 'Bearer realm="sluice"'
    refused = http.get("/v1/models", headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


def test_a_token_is_no_key_in_another_header(http: httpx.Client) -> None:
    for name in ("x-api-key", "api-key"):
        refused = http.post(INFER, json=ECHO, headers={name: TOKEN})
        assert (refused.status_code, message_of(refused)) == (401, WRONG)


def test_a_token_is_the_key_of_openais_client(server: Serving) -> None:
    with openai.OpenAI(base_url=f"{server.http}/v1", api_key=TOKEN, max_retries=0) as client:
        assert isinstance(client.models.list().data, list)


def test_a_token_is_metadata_of_an_rpc(server: Serving) -> None:
    with grpc.insecure_channel(server.grpc) as channel:

        def status(path: str, token: str) -> tuple[str, str]:
            return status_of(channel, f"{SERVICE}/{path}", [("authorization", f"Bearer {token}")])

        assert status("ServerMetadata", TOKEN)[0] == "OK"
        assert status("ModelStatistics", OBSERVER)[0] == "OK"
        forbidden = ("PERMISSION_DENIED", "the token has the role infer, expected observe or admin")
        assert status("ModelStatistics", TOKEN) == forbidden
        for wrong in WRONG_TOKENS.values():
            assert status("ServerMetadata", wrong) == ("UNAUTHENTICATED", WRONG)
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        assert client.get_server_metadata(headers={"authorization": f"Bearer {TOKEN}"}).name
        with pytest.raises(InferenceServerException, match="is missing"):
            client.get_server_metadata()


def test_refused_tokens_are_counted(server: Serving, http: httpx.Client) -> None:
    name = 'gateway_auth_failures_total{reason="wrong",wire="http"}'
    before = server.metrics().get(name, 0)
    http.post(INFER, json=ECHO, headers=bearer(WRONG_TOKENS["forged"]))
    after = server.metrics()
    assert after[name] == before + 1
    assert after["gateway_jwks_reload_failures_total"] == 0
    assert after["gateway_keys_reload_failures_total"] == 0


def test_an_expired_token_ends_its_streams_and_no_others(server: Serving) -> None:
    expires = int(time.time()) + 5
    token = SIGNING.token(exp=expires)
    line, metadata = f"Authorization: Bearer {token}", [("authorization", f"Bearer {token}")]
    with (
        Connection(server.ports["http"]) as expired,
        Connection(server.ports["http"]) as kept,
        connected(server.grpc) as stub,
        streaming(stub, metadata=metadata) as rpc,
    ):
        with accepted(server, "repeat"):
            kept.ask(STREAM, LONG, f"Authorization: Bearer {TOKEN}")
        with accepted(server, "repeat"):
            expired.ask(STREAM, LONG, line)
        with accepted(server, "endless"):
            rpc.ask(infer_request("endless", "one", INPUT="x"))
        wait_until(
            lambda: server.metric(IN_FLIGHT, "repeat") == 1,
            "the stream has ended",
            expires + NOTICED_SECS - time.time(),
        )
        assert time.time() >= expires
        assert expired.answer().body.endswith(f'data: {{"error":"{NO_LONGER}"}}\n\n'.encode())
        assert rpc.answer().error_message == NO_LONGER
        rpc.ask(infer_request("repeat", "two", **LONG))
        assert rpc.answer().error_message == NO_LONGER
        assert server.metric(IN_FLIGHT, "endless") == 0
        assert server.metric(IN_FLIGHT, "repeat") == 1
        refused = httpx.get(f"{server.http}/v2", headers=bearer(token))
        assert (refused.status_code, message_of(refused)) == (401, WRONG)

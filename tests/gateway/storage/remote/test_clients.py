"""Clients of obstore: whose credentials they send, and which places they ask."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from gateway.storage.remote.addresses import parse_address
from gateway.storage.remote.clients import GOOGLE_FILE, INSTANCE, connect, open_store
from gateway.storage.remote.credentials import FILE, CredentialError
from gateway.storage.remote.objects import FIRST, Connection, ObjectStore, Patience, RemoteError

SOON = Patience(retries=0, within_s=5)
KEYS = {"AWS_ACCESS_KEY_ID": "OURS", "AWS_SECRET_ACCESS_KEY": "SECRET"}
CLEARED = ("AWS_", "AZURE_", "GOOGLE_", "GCE_", "IDENTITY_", "HTTP_PROXY", "http_proxy")


class Recorder:
    """A server that refuses all; `asked` has each path with the credential that came with it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []
        recorder = self

        class Answerer(BaseHTTPRequestHandler):
            """Refuses."""

            def do_GET(self) -> None:
                key = self.headers.get("Authorization", "")
                token = self.headers.get("x-amz-security-token", "")
                recorder.asked.append((self.path, key, token))
                self.send_response(403)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_HEAD = do_PUT = do_GET

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answerer)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    poll = {"poll_interval": 0.01}
    thread = threading.Thread(target=recorder.server.serve_forever, kwargs=poll)
    thread.start()
    yield recorder
    recorder.server.shutdown()
    thread.join()
    recorder.server.server_close()


@pytest.fixture(autouse=True)
def metadata(recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A process without credentials, whose metadata addresses are those of the recorder."""
    import os

    for name in os.environ:
        if name.startswith(CLEARED):
            monkeypatch.delenv(name)
    url = f"{recorder.url}/metadata"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", url)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
    monkeypatch.setenv("GCE_METADATA_HOST", url.removeprefix("http://"))
    monkeypatch.setenv("IDENTITY_ENDPOINT", url)
    return url


def refusal(address: str, environment: Mapping[str, str]) -> str:
    with pytest.raises(RemoteError) as raised:
        open_store(address, environment, SOON).list()
    return str(raised.value)


def test_a_request_is_signed_by_the_keys_that_were_given_and_no_other(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "OTHERS")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    refusal(f"s3://{recorder.url}/b", KEYS)
    for path, key, token in recorder.asked:
        assert path.startswith("/b?")
        assert "Credential=OURS/" in key
        assert token == ""
    assert len(recorder.asked) == 2


def test_a_session_token_is_sent_with_its_keys(recorder: Recorder) -> None:
    refusal(f"s3://{recorder.url}/b", {**KEYS, "AWS_SESSION_TOKEN": "TOKEN"})
    assert {token for _, _, token in recorder.asked} == {"TOKEN"}


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_address_without_an_endpoint_has_that_of_the_variable(
    recorder: Recorder, variable: str
) -> None:
    store = open_store("s3://b/p", {**KEYS, variable: f"{recorder.url}/"}, SOON)
    assert store.origin == f"s3://{recorder.url}/b/p"


@pytest.mark.parametrize(
    ("address", "variable"),
    [("s3://b", "AWS_ENDPOINT_URL"), ("as://a/b", "AZURE_STORAGE_ENDPOINT")],
)
@pytest.mark.parametrize("endpoint", ["http://u:SECRET@host:9000", "http://host/a?sig=SECRET"])
def test_an_endpoint_of_a_variable_has_no_secrets(
    address: str, variable: str, endpoint: str
) -> None:
    with pytest.raises(CredentialError, match="has a user, a query or a fragment") as raised:
        open_store(address, {variable: endpoint})
    assert "SECRET" not in str(raised.value)


def test_accounts_of_azure_are_those_of_the_variable_or_else_of_the_address() -> None:
    account = {"AZURE_STORAGE_ACCOUNT": "mine"}
    assert open_store("as://other/c/p", account).origin == "as://mine/c/p"
    assert open_store("as://other/c/p", {}).origin == "as://other/c/p"


@pytest.mark.parametrize(
    ("address", "variable", "endpoint"),
    [
        ("s3://b", "AWS_ENDPOINT_URL", "/"),
        ("gs://b", "STORAGE_EMULATOR_HOST", "/"),
        ("as://account/b", "AZURE_STORAGE_ENDPOINT", "/account"),
    ],
)
def test_without_credentials_requests_are_unsigned_and_no_metadata_address_is_asked(
    recorder: Recorder, address: str, variable: str, endpoint: str
) -> None:
    text = refusal(address, {variable: recorder.url + endpoint})
    assert {key for _, key, _ in recorder.asked} == {""}
    assert not [path for path, _, _ in recorder.asked if "metadata" in path]
    assert "the request was not signed: none of " in text
    assert f"{INSTANCE} is not true" in text


@pytest.mark.parametrize(
    ("address", "environment"),
    [
        ("s3://http://127.0.0.1:9/b", {INSTANCE: "true"}),
        ("gs://b", {INSTANCE: "true"}),
        ("as://account/b", {"AZURE_STORAGE_AUTH_TYPE": "managed_identity"}),
    ],
)
def test_a_metadata_address_is_asked_where_the_operator_says_so(
    recorder: Recorder, address: str, environment: Mapping[str, str]
) -> None:
    refusal(address, environment)
    assert [path for path, _, _ in recorder.asked if "metadata" in path]


def test_keys_in_a_credential_file_are_missing_by_its_name(
    recorder: Recorder, tmp_path: Path
) -> None:
    path = tmp_path / "credentials.json"
    path.write_text('{"s3": {"": {"region": "eu-1"}}}')
    text = refusal(f"s3://{recorder.url}/b", {**KEYS, FILE: str(path)})
    assert f"the file of {FILE} has no keys" in text
    assert str(path) not in text
    assert {key for _, key, _ in recorder.asked} == {""}


@pytest.mark.parametrize(
    ("address", "entry", "replaced"),
    [("s3://b", {"region": "eu-1"}, KEYS), ("gs://b", "", {GOOGLE_FILE: "/key.json"})],
)
def test_keys_of_the_environment_are_not_sent_for_a_role_in_a_credential_file(
    address: str, entry: Any, replaced: Mapping[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "credentials.json"
    path.write_text(json.dumps({address[:2]: {"": entry}}))
    role = {INSTANCE: "true", FILE: str(path)}
    variable = next(iter(replaced))
    assert f"and {variable} is set: unset it" in refusal(address, {**role, **replaced})
    assert connect(parse_address(address), role, SOON).unsigned == ""


def test_the_path_of_a_credential_file_is_logged_once(
    recorder: Recorder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "credentials.json"
    path.write_text('{"s3": {"": {}}}')
    with caplog.at_level("INFO", "sluice.remote"):
        refusal(f"s3://{recorder.url}/b", {FILE: str(path)})
    assert [(each.variable, each.path) for each in caplog.records] == [(FILE, str(path))]  # type: ignore[attr-defined]


def test_a_profile_signs_by_its_keys(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "aws"
    keys = "aws_access_key_id = TEAMS\naws_secret_access_key = SECRET\n"
    file.write_text(f"[team]\n{keys}region = eu-7\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    refusal(f"s3://{recorder.url}/b", {"AWS_PROFILE": "team"})
    signed = recorder.asked[0][1]
    assert "Credential=TEAMS/" in signed
    assert "/eu-7/s3/" in signed
    assert "profile 'none' of AWS has no credentials" in refusal(
        f"s3://{recorder.url}/b", {"AWS_PROFILE": "none"}
    )


def test_a_profile_without_keys_asks_a_metadata_address_only_where_the_operator_says_so(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config"
    file.write_text("[profile team]\nregion = eu-7\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    text = refusal(f"s3://{recorder.url}/b", {"AWS_PROFILE": "team"})
    assert "profile 'team' of AWS has no credentials" in text
    assert recorder.asked == []
    refusal(f"s3://{recorder.url}/b", {"AWS_PROFILE": "team", INSTANCE: "true"})
    assert recorder.asked


def test_a_profile_without_boto3_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    assert 'pip install "sluice[aws]"' in refusal("s3://b", {"AWS_PROFILE": "team"})


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("SECRET", "is no credential file of Google"),
        ("[]", "is no credential file of Google"),
        ('{"type": "external_account"}', "external_account"),
    ],
)
def test_a_credential_file_of_google_that_cannot_be_used_is_named(
    content: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "google.auth", None)
    path = tmp_path / "key.json"
    path.write_text(content)
    text = refusal("gs://b", {"GOOGLE_APPLICATION_CREDENTIALS": str(path)})
    assert error in text
    assert GOOGLE_FILE in text
    assert str(path) not in text
    assert "SECRET" not in text


SERVICE = {"type": "service_account", "client_email": "a@b", "private_key_id": "1"}
USER = {"type": "authorized_user", "client_id": "a", "client_secret": "SECRET"}


def test_accounts_of_google_sign_requests(tmp_path: Path) -> None:
    key = rsa.generate_private_key(65537, 2048).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    path = tmp_path / "account.json"
    accounts = ({**SERVICE, "private_key": key.decode()}, {**USER, "refresh_token": "R"})
    for account in accounts:
        path.write_text(json.dumps(account))
        environment = {"GOOGLE_APPLICATION_CREDENTIALS": str(path)}
        assert connect(parse_address("gs://b"), environment, SOON).unsigned == ""


@pytest.mark.parametrize(
    ("account", "error"),
    [
        ({**SERVICE, "private_key": "SECRET"}, "Error reading pem file"),
        (USER, "missing field `refresh_token`"),
    ],
)
def test_an_account_of_google_that_cannot_sign_is_named(
    account: dict[str, str], error: str, tmp_path: Path
) -> None:
    path = tmp_path / "account.json"
    path.write_text(json.dumps(account))
    text = refusal("gs://b", {"GOOGLE_APPLICATION_CREDENTIALS": str(path)})
    assert error in text
    assert "SECRET" not in text


def test_a_key_of_azure_that_is_no_base64_is_named_and_not_repeated() -> None:
    text = refusal("as://account/b", {"AZURE_STORAGE_KEY": "SECRET !"})
    assert "the key of account 'account' is no base64" in text
    assert "SECRET" not in text


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("sas", "auth_type is 'sas', expected one of key, managed_identity, default"),
        ("default", "pip install azure-identity"),
    ],
)
def test_a_kind_of_credential_of_azure_that_cannot_be_used_is_named(
    kind: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    assert error in refusal("as://account/b", {"AZURE_STORAGE_AUTH_TYPE": kind})


def test_a_configuration_of_aws_that_is_damaged_is_not_named_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config"
    file.write_text("[profile")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    text = refusal("s3://b", {"AWS_PROFILE": "team"})
    assert "profile 'team' of AWS has no credentials: Unable to parse config file" in text
    assert str(tmp_path) not in text


def test_a_listing_may_have_less_patience_than_its_store() -> None:
    asked: list[Patience] = []

    def refuse(patience: Patience) -> Connection:
        asked.append(patience)
        raise CredentialError("none")

    store = ObjectStore(parse_address("s3://b"), refuse, SOON, SOON)
    for patience in (None, FIRST):
        with pytest.raises(RemoteError):
            store.list(patience=patience)
    assert asked == [SOON, FIRST]


def test_a_damaged_credential_file_ends_the_opening(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    path.write_text("{")
    with pytest.raises(CredentialError, match="is no JSON"):
        open_store("s3://b", {"TRITON_CLOUD_CREDENTIAL_PATH": str(path)})


def test_a_server_of_local_folders_imports_no_client_of_clouds() -> None:
    clouds = ("obstore", "boto3", "botocore", "azure", "moto")
    program = (
        "import sys, gateway.server, gateway.storage.remote.clients; "
        f"print([name for name in {clouds} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("[]\n", "")

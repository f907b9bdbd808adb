"""Stores of an address, on clients of obstore that have the credentials of the environment.

Obstore adds variables of the environment to its arguments, so that each that matters is an
argument here.
"""

import base64
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gateway.storage.remote.addresses import Address, parse_address
from gateway.storage.remote.credentials import FILE, VARIABLES, CredentialError, read_credential
from gateway.storage.remote.failures import words_of
from gateway.storage.remote.objects import LISTED, READ, Connection, ObjectStore, Patience

INSTANCE = "SLUICE_INSTANCE_CREDENTIALS"
"""With `true`, AWS and Google may be asked for the credentials of this machine."""
POD_VARIABLES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Set by EKS and ECS in a container with a role."""
GOOGLE = "https://storage.googleapis.com"
GOOGLE_FILE = VARIABLES["gs"]["path"]
AUTH_TYPES = ("key", "managed_identity", "default")

log = logging.getLogger("sluice.remote")

Environment = Mapping[str, str]
Credential = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of a client of obstore for one cloud; `unsigned` as in Connection."""

    url: str
    more: Mapping[str, Any]
    unsigned: str = ""


def open_store(
    text: str, environment: Environment, listed: Patience = LISTED, read: Patience = READ
) -> ObjectStore:
    """The objects at an address; AddressError or CredentialError. Nothing is asked yet."""
    address = parse_address(text)
    _log_file(FILE, environment.get(FILE))
    found = read_credential(address, environment)
    _log_file(_google_variable(environment), found.get("path"))
    endpoint = _endpoint(address, found, environment)
    if set("@?#") & set(endpoint):
        raise CredentialError(
            f"the endpoint of {address.scheme}:// in the environment has a user, a query or a "
            "fragment, expected PROTOCOL://HOST:PORT: credentials have variables of their own"
        )
    located = replace(address, endpoint=endpoint)
    return ObjectStore(located, partial(connect, located, environment), listed, read)


def connect(address: Address, environment: Environment, patience: Patience) -> Connection:
    """A client for a located address, with its credentials as they are now."""
    from obstore import store

    make, arguments_of = {
        "s3": (store.S3Store, _s3),
        "gs": (store.GCSStore, _gs),
        "as": (store.AzureStore, _as),
    }[address.scheme]
    arguments = arguments_of(address, read_credential(address, environment), environment)
    options = {**patience.client_options(), "allow_http": arguments.url.startswith("http://")}
    client = make(
        address.bucket,
        client_options=options,
        retry_config=patience.retry_config(),
        **arguments.more,
    )
    return Connection(client, arguments.url, arguments.unsigned)


def _endpoint(address: Address, found: Credential, environment: Environment) -> str:
    """The endpoint of the address, or that of a variable."""
    if address.scheme == "as":
        account = found.get("account_str") or address.endpoint
        return environment.get("AZURE_STORAGE_ENDPOINT", "").rstrip("/") or account
    if address.scheme == "gs":
        host = environment.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
        return f"http://{host}" if host and "://" not in host else host
    named = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    others = (value.rstrip("/") for name in named if (value := environment.get(name)))
    return address.endpoint or next(others, "")


def _s3(address: Address, found: Credential, environment: Environment) -> Arguments:
    region = found.get("region") or environment.get("AWS_REGION") or ""
    if found.get("key_id") and found.get("secret_key"):
        keys = {
            "access_key_id": found["key_id"],
            "secret_access_key": found["secret_key"],
            "token": found.get("session_token"),
            "expires_at": None,
        }
        return _s3_signed(address, region, credential_provider=lambda: keys)
    if profile := found.get("profile"):
        provider, its_region = _profile(profile, environment)
        return _s3_signed(address, region or its_region, credential_provider=provider)
    if any(environment.get(name) for name in POD_VARIABLES) or _may_ask(environment):
        _refuse_replaced("AWS_ACCESS_KEY_ID", environment)
        return _s3_signed(address, region)
    tried = (*VARIABLES["s3"].values(), *POD_VARIABLES)
    signed = _s3_signed(address, region)
    unsigned = _unsigned(tried, environment)
    return replace(signed, more={**signed.more, "skip_signature": True}, unsigned=unsigned)


def _s3_signed(address: Address, region: str, **credentials: Any) -> Arguments:
    region = region or "us-east-1"
    url = address.endpoint or f"https://s3.{region}.amazonaws.com"
    fixed = {"virtual_hosted_style_request": False, "skip_signature": False}
    return Arguments(url, {"endpoint": url, "region": region, **fixed, **credentials})


def _profile(name: str, environment: Environment) -> tuple[Callable[[], Any], str]:
    """Credentials and region of a profile in ~/.aws; boto3 reads its files, and signs on."""
    try:
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise CredentialError('AWS_PROFILE needs boto3: pip install "sluice[aws]"') from None
    session = Session(profile=name)
    try:
        if not _may_ask(environment):
            session.get_component("credential_provider").remove("iam-role")
        return Boto3CredentialProvider(session), session.get_config_variable("region") or ""
    except (BotoCoreError, ValueError) as error:
        raise CredentialError(
            f"profile '{name}' of AWS has no credentials: {words_of(error)}"
        ) from None


def _gs(address: Address, found: Credential, environment: Environment) -> Arguments:
    url = address.endpoint or GOOGLE
    path = found.get("path")
    if path and not address.endpoint:
        return Arguments(url, _google_file(path, _google_variable(environment)))
    if not address.endpoint and _may_ask(environment):
        _refuse_replaced(GOOGLE_FILE, environment)
        return Arguments(url, {})
    # With `skip_signature` the metadata service is asked all the same.
    nameless = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    account = {"gcs_base_url": url, "disable_oauth": True, **nameless}
    unsigned = _unsigned(VARIABLES["gs"].values(), environment)
    return Arguments(url, {"service_account_key": json.dumps(account)}, unsigned)


def _google_variable(environment: Environment) -> str:
    """The variable by which the file of an account of Google is found."""
    return FILE if environment.get(FILE) else GOOGLE_FILE


def _log_file(variable: str, path: str | None) -> None:
    """Log the path of a file of credentials: errors, which reach clients, name the variable."""
    if path:
        log.info("credential file named", extra={"variable": variable, "path": path})


def _google_file(path: str, variable: str) -> dict[str, Any]:
    try:
        kind = json.loads(Path(path).read_bytes())["type"]
    except OSError as error:
        raise CredentialError(
            f"cannot read the file that {variable} names: {error.strerror}"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise CredentialError(
            f"the file that {variable} names is no credential file of Google: expected JSON with a "
            "type"
        ) from None
    if kind == "service_account":
        return {"service_account": path}
    if kind == "authorized_user":
        return {"application_credentials": path}
    try:
        import google.auth
        from obstore.auth.google import GoogleCredentialProvider
    except ImportError:
        raise CredentialError(
            f"the file that {variable} names has type {kind}, which needs google-auth"
        ) from None
    scopes = ["https://www.googleapis.com/auth/devstorage.read_only"]
    credentials, _ = google.auth.load_credentials_from_file(path, scopes=scopes)
    return {"credential_provider": GoogleCredentialProvider(credentials)}


def _as(address: Address, found: Credential, environment: Environment) -> Arguments:
    is_url = "://" in address.endpoint
    account = found.get("account_str") or parse_address(address.text).endpoint
    url = address.endpoint if is_url else f"https://{address.endpoint}.blob.core.windows.net"
    fixed: dict[str, Any] = {"account_name": account, "endpoint": url, "skip_signature": False}
    kind = found.get("auth_type", "key")
    if kind not in AUTH_TYPES:
        expected = ", ".join(AUTH_TYPES)
        raise CredentialError(f"auth_type is '{kind}', expected one of {expected}")
    if kind == "managed_identity":
        chosen = {"client_id": found["client_id"]} if "client_id" in found else {}
        return Arguments(url, {**fixed, **chosen})
    if kind == "default":
        return Arguments(url, {**fixed, "credential_provider": _azure_chain()})
    if key := found.get("account_key"):
        access = {"access_key": _base64(key, account), "expires_at": None}
        return Arguments(url, {**fixed, "credential_provider": lambda: access})
    unsigned = _unsigned(VARIABLES["as"].values(), environment)
    return Arguments(url, {**fixed, "skip_signature": True}, unsigned)


def _base64(key: str, account: str) -> str:
    try:
        base64.b64decode(key, validate=True)
    except ValueError:
        raise CredentialError(
            f"the key of account '{account}' is no base64: copy it as it is in Azure's portal"
        ) from None
    return key


def _azure_chain() -> Callable[[], Any]:
    try:
        from obstore.auth.azure import AzureCredentialProvider
    except ImportError:
        raise CredentialError(
            "auth_type 'default' needs azure-identity: pip install azure-identity"
        ) from None
    return AzureCredentialProvider()


def _may_ask(environment: Environment) -> bool:
    """Whether the operator allows that a metadata address is asked."""
    return environment.get(INSTANCE, "").lower() in ("1", "true")


def _refuse_replaced(variable: str, environment: Environment) -> None:
    """Refuse a variable that a credential file replaces: obstore prefers it to a role."""
    if environment.get(FILE) and environment.get(variable):
        raise CredentialError(
            f"the file of {FILE} has no keys for this address, and {variable} is set: unset it, or "
            "add keys to the file"
        )


def _unsigned(tried: Any, environment: Environment) -> str:
    if environment.get(FILE):
        return f"the file of {FILE} has no keys for this address"
    return f"none of {', '.join(tried)} is enough, and {INSTANCE} is not true"
